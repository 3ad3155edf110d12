{{/* A DevicePool's pod template out of its shorter settings, with `podTemplate` over them: dict "root" $ "pool" .  */}}
{{- define "relight.podTemplate" -}}
{{- $pool := .pool -}}
{{- $resources := deepCopy (default dict $pool.resources) -}}
{{- $extra := deepCopy (default dict $pool.extraResources) -}}
{{- $capabilities := list -}}
{{- with $pool.rdma -}}
{{- $_ := set $extra .resourceName .count -}}
{{- $capabilities = list "IPC_LOCK" -}}
{{- end -}}
{{- if $pool.ipcLock -}}{{- $capabilities = list "IPC_LOCK" -}}{{- end -}}
{{- if $extra -}}
{{- range $kind := list "requests" "limits" -}}
{{- $_ := set $resources $kind (merge (default dict (index $resources $kind)) $extra) -}}
{{- end -}}
{{- end -}}
{{- $engine := dict "name" "engine" -}}
{{- if $resources -}}{{- $_ := set $engine "resources" $resources -}}{{- end -}}
{{- $security := deepCopy (default dict $pool.securityContext) -}}
{{- if $capabilities -}}
{{- $security = mergeOverwrite (dict "capabilities" (dict "add" $capabilities)) $security -}}
{{- end -}}
{{- if $security -}}{{- $_ := set $engine "securityContext" $security -}}{{- end -}}
{{- range $key := list "env" "envFrom" -}}
{{- with index $pool $key -}}{{- $_ := set $engine $key . -}}{{- end -}}
{{- end -}}
{{- $mounts := list -}}
{{- $volumes := list -}}
{{- with $pool.sharedMemory -}}
{{- $volumes = append $volumes (dict "name" "shm" "emptyDir" (dict "medium" "Memory" "sizeLimit" .)) -}}
{{- $mounts = append $mounts (dict "name" "shm" "mountPath" "/dev/shm") -}}
{{- end -}}
{{- $agentMounts := list -}}
{{- with $pool.weights -}}
{{- if .claimName -}}
{{- $volumes = append $volumes (dict "name" "weights" "persistentVolumeClaim" (dict "claimName" .claimName "readOnly" true)) -}}
{{- else -}}
{{- $volumes = append $volumes (dict "name" "weights" "hostPath" (dict "path" .hostPath "type" "Directory")) -}}
{{- end -}}
{{- $weights := dict "name" "weights" "mountPath" .mountPath "readOnly" true -}}
{{- $mounts = append $mounts $weights -}}
{{- $agentMounts = list $weights -}}
{{- end -}}
{{- $volumes = concat $volumes (default list $pool.extraVolumes) -}}
{{- $mounts = concat $mounts (default list $pool.extraVolumeMounts) -}}
{{- with $mounts -}}{{- $_ := set $engine "volumeMounts" . -}}{{- end -}}
{{- $agent := dict "name" "agent" -}}
{{- with $pool.agentImage -}}{{- $_ := set $agent "image" . -}}{{- end -}}
{{- with (coalesce $pool.agentResources .root.Values.agent.resources) -}}{{- $_ := set $agent "resources" . -}}{{- end -}}
{{- with .root.Values.agent.securityContext -}}{{- $_ := set $agent "securityContext" . -}}{{- end -}}
{{- with $agentMounts -}}{{- $_ := set $agent "volumeMounts" . -}}{{- end -}}
{{- $spec := dict "automountServiceAccountToken" false -}}
{{- $pull := list -}}
{{- range (default .root.Values.global.imagePullSecrets $pool.imagePullSecrets) -}}{{- $pull = append $pull (dict "name" .) -}}{{- end -}}
{{- with $pull -}}{{- $_ := set $spec "imagePullSecrets" . -}}{{- end -}}
{{- range $key := list "nodeSelector" "tolerations" "affinity" "topologySpreadConstraints" "priorityClassName" "runtimeClassName" "schedulerName" "serviceAccountName" "terminationGracePeriodSeconds" -}}
{{- with index $pool $key -}}{{- $_ := set $spec $key . -}}{{- end -}}
{{- end -}}
{{- with $pool.podSecurityContext -}}{{- $_ := set $spec "securityContext" . -}}{{- end -}}
{{- $own := deepCopy (default dict $pool.podTemplate) -}}
{{- $theirs := default dict $own.spec -}}
{{- $others := list -}}
{{- range (default list $theirs.containers) -}}
{{- if eq .name "engine" -}}
{{- $engine = mergeOverwrite $engine . -}}
{{- else if eq .name "agent" -}}
{{- $agent = mergeOverwrite $agent . -}}
{{- else -}}
{{- $others = append $others . -}}
{{- end -}}
{{- end -}}
{{- $volumes = concat $volumes (default list $theirs.volumes) -}}
{{- $spec = mergeOverwrite $spec (omit $theirs "containers" "volumes") -}}
{{- $_ := set $spec "containers" (concat (list $engine $agent) $others) -}}
{{- with $volumes -}}{{- $_ := set $spec "volumes" . -}}{{- end -}}
{{- $metadata := default dict $own.metadata -}}
{{- with $pool.podLabels -}}{{- $_ := set $metadata "labels" (merge (default dict $metadata.labels) .) -}}{{- end -}}
{{- with $pool.podAnnotations -}}{{- $_ := set $metadata "annotations" (merge (default dict $metadata.annotations) .) -}}{{- end -}}
{{- $template := dict "spec" $spec -}}
{{- with $metadata -}}{{- $_ := set $template "metadata" . -}}{{- end -}}
{{- toYaml $template -}}
{{- end -}}

{{/*
The number of replicas to write: what the cluster has, where somebody else writes it. dict "kind" "DevicePool"
"namespace" … "name" … "replicas" … "scaled" true
*/}}
{{- define "relight.replicas" -}}
{{- $replicas := .replicas -}}
{{- if .scaled -}}
{{- $live := lookup "relight.dev/v1alpha1" .kind .namespace .name -}}
{{- if and $live $live.spec -}}{{- $replicas = default 0 $live.spec.replicas -}}{{- end -}}
{{- end -}}
{{- int $replicas -}}
{{- end -}}
