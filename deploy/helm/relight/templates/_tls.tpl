{{/*
Certificates that the chart makes itself: an authority whose key is not kept, and one certificate for each kind of
process. Made once for a release: an upgrade takes what the cluster has. Kept in .Values for the rest of this rendering.
*/}}
{{- define "relight.tlsMade" -}}
{{- if not (hasKey .Values "tlsMade") -}}
{{- $made := dict -}}
{{- $found := true -}}
{{- range list "controller" "gateway" "agent" "scaler" -}}
{{- $secret := lookup "v1" "Secret" $.Release.Namespace (printf "%s-%s-tls" (include "relight.fullname" $) .) -}}
{{- if and $secret $secret.data -}}
{{- $_ := set $made . $secret.data -}}
{{- else -}}
{{- $found = false -}}
{{- end -}}
{{- end -}}
{{- if not $found -}}
{{- $days := int .Values.tls.selfSigned.days -}}
{{- $authority := genCAWithKey "relight" $days (genPrivateKey "ecdsa") -}}
{{- $hosts := include "relight.hosts" . | fromJson -}}
{{- range $part, $names := $hosts -}}
{{- $certificate := genSignedCertWithKey (first $names.dns) $names.ip $names.dns $days $authority (genPrivateKey "ecdsa") -}}
{{- $_ := set $made $part (dict "ca.crt" (b64enc $authority.Cert) "tls.crt" (b64enc $certificate.Cert) "tls.key" (b64enc $certificate.Key)) -}}
{{- end -}}
{{- end -}}
{{- $_ := set .Values "tlsMade" $made -}}
{{- end -}}
{{- end -}}

{{/* By which names each kind of process is reached, as JSON. The first is what it is called. */}}
{{- define "relight.hosts" -}}
{{- $full := include "relight.fullname" . -}}
{{- $dns := list "controller" -}}
{{- range list "controller" "metrics" "external-scaler" -}}
{{- $service := printf "%s-%s" $full . -}}
{{- $dns = concat $dns (list $service (printf "%s.%s" $service $.Release.Namespace) (printf "%s.%s.svc" $service $.Release.Namespace)) -}}
{{- end -}}
{{- $ip := list "127.0.0.1" -}}
{{- $others := list "localhost" -}}
{{- range .Values.tls.extraHosts -}}
{{- if regexMatch "^([0-9.]+|[0-9a-fA-F:]+:[0-9a-fA-F:]*)$" . -}}{{- $ip = append $ip . -}}{{- else -}}{{- $others = append $others . -}}{{- end -}}
{{- end -}}
{{- dict
  "controller" (dict "dns" (concat $dns $others) "ip" $ip)
  "gateway" (dict "dns" (list "gateway" "localhost") "ip" (list "127.0.0.1"))
  "agent" (dict "dns" (list "relight-agent" "localhost") "ip" (list "127.0.0.1"))
  "scaler" (dict "dns" (list "scaler") "ip" list)
  | toJson -}}
{{- end -}}

{{/* dict "root" $ "part" "controller": the Secret with its certificate, as tls.crt, tls.key and ca.crt. */}}
{{- define "relight.tlsSecret" -}}
{{- if eq .root.Values.tls.mode "existing" -}}
{{- index .root.Values.tls.existingSecrets .part -}}
{{- else -}}
{{- printf "%s-%s-tls" (include "relight.fullname" .root) .part -}}
{{- end -}}
{{- end -}}

{{- define "relight.tlsFiles" -}}
{"certificate": "{{ . }}/tls.crt", "private_key": "{{ . }}/tls.key", "authority": "{{ . }}/ca.crt"}
{{- end -}}
