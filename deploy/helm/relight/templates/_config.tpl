{{/* The configuration files of Relight's processes, as JSON. */}}

{{/* The gateway's token: made once for a release. Kept in .Values for the rest of this rendering. */}}
{{- define "relight.tokenMade" -}}
{{- if not (hasKey .Values "tokenMade") -}}
{{- $secret := lookup "v1" "Secret" .Release.Namespace (printf "%s-gateway-token" (include "relight.fullname" .)) -}}
{{- if and $secret $secret.data -}}
{{- $_ := set .Values "tokenMade" (b64dec (index $secret.data "token")) -}}
{{- else -}}
{{- $_ := set .Values "tokenMade" (randAlphaNum 48) -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{- define "relight.controllerConfig" -}}
{{- $full := include "relight.fullname" . -}}
{{- $own := .Values.controller -}}
{{- $tls := include "relight.tlsFiles" "/etc/relight-tls" | fromJson -}}
{{- $config := dict
  "http" (dict "host" "0.0.0.0" "port" 8443 "tls" $tls)
  "grpc" (dict "host" "0.0.0.0" "port" 8444 "tls" $tls)
  "log_level" .Values.logLevel
  "slot_grace_seconds" $own.settings.slotGraceSeconds
  "gateway_grace_seconds" $own.settings.gatewayGraceSeconds
  "event_stream_seconds" $own.settings.eventStreamSeconds
  "shutdown_grace_seconds" $own.settings.shutdownGraceSeconds
-}}
{{- with $own.settings.otlpEndpoint }}{{- $_ := set $config "otlp_endpoint" . }}{{- end }}
{{- $tokens := list -}}
{{- if .Values.gateway.enabled -}}
{{- $hash := .Values.gateway.token.sha256 -}}
{{- if not .Values.gateway.token.existingSecret -}}
{{- include "relight.tokenMade" . -}}
{{- $hash = sha256sum .Values.tokenMade -}}
{{- end -}}
{{- $tokens = append $tokens (dict "name" "gateway" "roles" (list "gateway") "sha256" $hash) -}}
{{- end -}}
{{- $_ := set $config "tokens" (default list (concat $tokens $own.tokens)) -}}
{{- $kubernetes := dict
  "namespace" .Release.Namespace
  "lease" (printf "%s-controller" $full)
  "lease_seconds" $own.settings.leaseSeconds
  "agent_image" (include "relight.image" (dict "root" . "image" .Values.agent.image))
  "controller_address" (include "relight.controllerAddress" .)
  "agent_secret" (printf "%s-agent" $full)
  "serving_port" .Values.agent.servingPort
  "metrics_port" .Values.agent.metricsPort
-}}
{{- if ne .Values.tls.mode "self-signed" }}
{{- $_ := set $kubernetes "agent_tls_secret" (include "relight.tlsSecret" (dict "root" . "part" "agent")) }}
{{- end }}
{{- if .Values.metrics.enabled }}
{{- $serving := dict "certificate" $tls.certificate "private_key" $tls.private_key }}
{{- $_ := set $kubernetes "metrics" (dict "host" "0.0.0.0" "port" 7402 "tls" $serving) }}
{{- end }}
{{- $_ := set $config "kubernetes" $kubernetes }}
{{- if .Values.externalScaler.enabled }}
{{- $_ := set $config "external_scaler" (dict "host" "0.0.0.0" "port" 7403 "tls" $tls) }}
{{- end }}
{{- if or .Values.redis.enabled .Values.externalRedis.url .Values.externalRedis.sentinels }}
{{- $_ := set $config "redis" (include "relight.redisConfig" . | fromJson) }}
{{- else }}
{{- $_ := set $config "state_path" "/var/lib/relight/state.sqlite" }}
{{- end }}
{{- toPrettyJson $config -}}
{{- end -}}

{{- define "relight.redisConfig" -}}
{{- $full := include "relight.fullname" . -}}
{{- $password := dict "file" "/etc/relight-redis/password" -}}
{{- $config := dict -}}
{{- if .Values.redis.enabled }}
{{- $config = dict "url" (printf "redis://%s-redis.%s.svc:6379/0" $full .Release.Namespace) "password" $password }}
{{- else }}
{{- $external := .Values.externalRedis }}
{{- with $external.url }}{{- $_ := set $config "url" . }}{{- end }}
{{- with $external.sentinels }}{{- $_ := set $config "sentinels" (dict "addresses" .addresses "service" .service) }}{{- end }}
{{- with $external.username }}{{- $_ := set $config "username" . }}{{- end }}
{{- if $external.existingSecret }}{{- $_ := set $config "password" $password }}{{- end }}
{{- $_ := set $config "prefix" $external.prefix }}
{{- if $external.tlsSecret }}
{{- $_ := set $config "tls" (dict "authority" "/etc/relight-redis-tls/ca.crt") }}
{{- end }}
{{- end }}
{{- toJson $config -}}
{{- end -}}

{{- define "relight.gatewayConfig" -}}
{{- $own := .Values.gateway.settings -}}
{{- $config := dict
  "controller_address" (include "relight.controllerAddress" .)
  "token_file" "/etc/relight-token/token"
  "tls" (include "relight.tlsFiles" "/etc/relight-tls" | fromJson)
  "host" "0.0.0.0" "port" 8080
  "log_level" .Values.logLevel
  "hold" (dict "limit" (int $own.hold.limit) "seconds" $own.hold.seconds "release_per_second" $own.hold.releasePerSecond)
  "max_body_bytes" (int64 $own.maxBodyBytes)
  "max_tries" (int $own.maxTries)
  "grace_seconds" $own.graceSeconds
-}}
{{- if .Values.gateway.httpsSecret }}
{{- $_ := set $config "https" (include "relight.tlsFiles" "/etc/relight-https" | fromJson) }}
{{- end }}
{{- toPrettyJson $config -}}
{{- end -}}

{{/* What agents in slot pods start with; the rest is told on their command line. */}}
{{- define "relight.agentConfig" -}}
{{- $config := dict
  "slot" "told-on-the-command-line"
  "controller_address" (include "relight.controllerAddress" .)
  "state_dir" "/relight/state"
  "tls" (include "relight.tlsFiles" "/etc/relight" | fromJson)
  "log_level" .Values.logLevel
-}}
{{- toPrettyJson (mergeOverwrite $config (deepCopy .Values.agent.config)) -}}
{{- end -}}

{{- define "relight.nodeConfig" -}}
{{- $own := .Values.node -}}
{{- toPrettyJson (dict
  "slot" "told-on-the-command-line"
  "controller_address" (include "relight.controllerAddress" .)
  "state_dir" "/var/lib/relight"
  "tls" (include "relight.tlsFiles" "/etc/relight-tls" | fromJson)
  "log_level" .Values.logLevel
  "force_tcp" true
  "host_tier" (dict "budget_bytes" (int64 $own.hostTierBytes))
  "compile_cache" (dict "quota_bytes" (int64 $own.compileCacheBytes))
) -}}
{{- end -}}
