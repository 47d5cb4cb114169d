{{/* Pod templates of a ModelService's parts, from values. dict "root" . "part" VALUES "selector" LABELS
     gives YAML, empty when nothing is asked for. */}}
{{- define "millrace.podTemplate" -}}
{{- $made := fromYaml (include "millrace.podTemplateOfValues" .) -}}
{{- include "millrace.merge" (dict "base" $made "over" (deepCopy (.part.template | default dict))) -}}
{{- with $made -}}
{{ toYaml . }}
{{- end -}}
{{- end -}}

{{- define "millrace.podTemplateOfValues" -}}
{{- if or .part.podLabels .part.podAnnotations }}
metadata:
  {{- with .part.podLabels }}
  labels: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .part.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- with include "millrace.podSpec" . | trim }}
spec: {{- . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "millrace.podSpec" -}}
{{- $part := deepCopy .part }}
{{- $root := .root }}
{{- if and $root.Values.priorityClass.create (not $part.priorityClassName) }}
{{- $_ := set $part "priorityClassName" (include "millrace.priorityClass" $root) }}
{{- end }}
{{- include "millrace.placement" (dict "part" $part) }}
{{- with $part.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- range . }}
  - {{ toYaml (mustMerge . (dict "labelSelector" (dict "matchLabels" $.selector))) | nindent 4 | trim }}
  {{- end }}
{{- end }}
{{- with $root.Values.image.pullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with include "millrace.rdmaPod" $part | trim }}
{{ . }}
{{- end }}
{{- with include "millrace.container" $part | trim }}
containers:
  - name: millrace
    {{- . | nindent 4 }}
{{- end }}
{{- end -}}

{{/* What huge pages and pinned memory ask of the pod. */}}
{{- define "millrace.rdmaPod" -}}
{{- if include "millrace.pinsAsRoot" . }}
# Linux takes added capabilities from every process that is not root's.
securityContext:
  runAsNonRoot: false
  runAsUser: 0
{{- end }}
{{- with .hugepages }}
volumes:
  - name: hugepages
    emptyDir:
      medium: HugePages-{{ .size }}
{{- end }}
{{- end -}}

{{- define "millrace.pinsAsRoot" -}}
{{- if .rdma }}{{ if and .rdma.enabled .rdma.ipcLock }}true{{ end }}{{ end -}}
{{- end -}}

{{- define "millrace.container" -}}
{{- with .env }}
env: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with fromYaml (include "millrace.resources" .) }}
resources: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if include "millrace.pinsAsRoot" . }}
securityContext:
  runAsNonRoot: false
  runAsUser: 0
  capabilities:
    # Memory that a network card reads and writes must be pinned.
    add: [IPC_LOCK]
    drop: [ALL]
{{- end }}
{{- if .hugepages }}
volumeMounts:
  - name: hugepages
    mountPath: /dev/hugepages
{{- end }}
{{- end -}}

{{/* resources, with RDMA devices and huge pages, whose requests must equal their limits. */}}
{{- define "millrace.resources" -}}
{{- $resources := deepCopy (.resources | default dict) -}}
{{- $devices := dict -}}
{{- with .rdma }}{{ if .enabled }}{{ $_ := set $devices .resource (.count | toString) }}{{ end }}{{ end -}}
{{- with .hugepages }}{{ $_ := set $devices (printf "hugepages-%s" .size) .amount }}{{ end -}}
{{- if $devices -}}
{{- range list "requests" "limits" -}}
{{- $_ := set $resources . (merge (deepCopy $devices) (get $resources . | default dict)) -}}
{{- end -}}
{{- end -}}
{{ toYaml $resources }}
{{- end -}}

{{/* A pool's fields as they stand in values, but for those that make its template. */}}
{{- define "millrace.pool" -}}
{{- $own := list "enabled" "resources" "rdma" "hugepages" "env" "nodeSelector" "affinity" "tolerations" -}}
{{- $own = concat $own (list "topologySpreadConstraints" "priorityClassName" "runtimeClassName") -}}
{{- $own = concat $own (list "podAnnotations" "podLabels" "template") -}}
{{- $pool := dict -}}
{{- range $field, $value := .part -}}
{{- if and (not (has $field $own)) (or $value (kindIs "float64" $value) (kindIs "int64" $value)) -}}
{{- $_ := set $pool $field $value -}}
{{- end -}}
{{- end -}}
{{ toYaml $pool }}
{{- with include "millrace.template" . }}
{{ . }}
{{- end }}
{{- end -}}

{{- define "millrace.template" -}}
{{- $selector := fromYaml (include "millrace.servicePods" .) -}}
{{- with include "millrace.podTemplate" (dict "root" .root "part" .part "selector" $selector) | trim -}}
template: {{- . | nindent 2 }}
{{- end -}}
{{- end -}}
