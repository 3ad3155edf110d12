{{/* Names, labels and images. */}}

{{- define "relight.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "relight.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "relight.name" . -}}
{{- if contains $name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* dict "root" $ "part" "controller" */}}
{{- define "relight.selector" -}}
app.kubernetes.io/name: {{ include "relight.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- end -}}

{{- define "relight.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{ include "relight.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: relight
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* dict "root" $ "image" .Values.controller.image: what an image is called, by digest where one is given. */}}
{{- define "relight.image" -}}
{{- $registry := coalesce .root.Values.global.imageRegistry .image.registry .root.Values.image.registry -}}
{{- if .image.digest -}}
{{- printf "%s/%s@%s" $registry .image.repository .image.digest -}}
{{- else -}}
{{- printf "%s/%s:%s" $registry .image.repository (coalesce .image.tag .root.Values.image.tag .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* Name of a component's service account: dict "root" $ "part" "controller" "account" .Values.controller.serviceAccount */}}
{{- define "relight.account" -}}
{{- if .account.create -}}
{{- default (printf "%s-%s" (include "relight.fullname" .root) .part) .account.name -}}
{{- else -}}
{{- default "default" .account.name -}}
{{- end -}}
{{- end -}}

{{/* Host and port at which agents and gateways find the leader. */}}
{{- define "relight.controllerAddress" -}}
{{- printf "%s-controller.%s.svc:8444" (include "relight.fullname" .) .Release.Namespace -}}
{{- end -}}

{{/* Every namespace with slot pods or nodes of Relight, as JSON: each has the Secret that agents start with. */}}
{{- define "relight.agentNamespaces" -}}
{{- $found := dict -}}
{{- range .Values.pools }}{{- $_ := set $found (default $.Release.Namespace .namespace) true }}{{- end }}
{{- range .Values.agent.namespaces }}{{- $_ := set $found . true }}{{- end }}
{{- if .Values.node.enabled }}{{- range (include "relight.nodeNamespaces" . | fromJsonArray) }}{{- $_ := set $found . true }}{{- end }}{{- end }}
{{- keys $found | sortAlpha | toJson -}}
{{- end -}}

{{- define "relight.nodeNamespaces" -}}
{{- default (list .Release.Namespace) .Values.node.namespaces | toJson -}}
{{- end -}}

{{/* Every namespace in which a ScaledObject of this chart asks the external scaler, as JSON. */}}
{{- define "relight.scalerNamespaces" -}}
{{- $found := dict -}}
{{- range .Values.models }}{{- if .scaledObject }}{{- $_ := set $found (default $.Release.Namespace .namespace) true }}{{- end }}{{- end }}
{{- keys $found | sortAlpha | toJson -}}
{{- end -}}
