{{/* What all of Relight's own pods have in common. */}}

{{/* dict "root" $ "own" .Values.controller: fields of a pod's spec that its component's values say. */}}
{{- define "relight.podSettings" -}}
{{- with .root.Values.global.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- with .own.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .own.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .own.topologySpreadConstraints }}
topologySpreadConstraints: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Off the nodes that have one of them already, where there are others. dict "root" $ "part" "controller" */}}
{{- define "relight.apart" -}}
affinity:
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels: {{- include "relight.selector" . | nindent 14 }}
{{- end -}}

{{/* dict "root" $ "own" .Values.controller: fields of a container that its component's values say. */}}
{{- define "relight.containerSettings" -}}
imagePullPolicy: {{ default .root.Values.image.pullPolicy .own.image.pullPolicy }}
{{- with .own.envFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
resources: {{- toYaml .own.resources | nindent 2 }}
securityContext: {{- toYaml .own.securityContext | nindent 2 }}
{{- end -}}
