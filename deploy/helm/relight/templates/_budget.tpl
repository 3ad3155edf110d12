{{/* A PodDisruptionBudget: dict "root" $ "part" "controller" "own" .Values.controller */}}
{{- define "relight.budget" }}
apiVersion: {{ ternary "policy/v1" "policy/v1beta1" (.root.Capabilities.APIVersions.Has "policy/v1") }}
kind: PodDisruptionBudget
metadata:
  name: {{ include "relight.fullname" .root }}-{{ .part }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "relight.labels" (dict "root" .root "part" .part) | nindent 4 }}
spec:
  maxUnavailable: {{ .own.podDisruptionBudget.maxUnavailable }}
  selector:
    matchLabels: {{- include "relight.selector" (dict "root" .root "part" .part) | nindent 6 }}
{{- end }}

{{/* An HPA's version: what the cluster has, the newest first. */}}
{{- define "relight.autoscaling" -}}
{{- ternary "autoscaling/v2" "autoscaling/v2beta2" (.Capabilities.APIVersions.Has "autoscaling/v2") -}}
{{- end }}
