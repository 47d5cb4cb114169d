{{/* The name of the ModelService, and the beginning of every object's name. 40 characters leave room for
     what the operator and StatefulSets append. */}}
{{- define "millrace.name" -}}
{{- .Values.nameOverride | default .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels of what the chart itself makes: dict "root" . "component" NAME */}}
{{- define "millrace.labels" -}}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: millrace
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{ include "millrace.selector" . }}
{{- end -}}

{{/* The part of them that never changes. */}}
{{- define "millrace.selector" -}}
app.kubernetes.io/name: millrace
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* Labels that the operator puts on a ModelService's pods: dict "root" . "component" NAME */}}
{{- define "millrace.servicePods" -}}
millrace.dev/service: {{ include "millrace.name" .root }}
app.kubernetes.io/component: {{ .component }}
{{- end -}}

{{/* The image of a role: dict "root" . "role" NAME */}}
{{- define "millrace.image" -}}
{{- $image := .root.Values.image -}}
{{- with get .root.Values.images .role -}}
{{ . }}
{{- else -}}
{{- with $image.registry }}{{ trimSuffix "/" . }}/{{ end -}}
millrace-{{ .role }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* Whether the chart makes a ModelService ("" or "true"). */}}
{{- define "millrace.serves" -}}
{{- if .Values.model.uri }}true{{ end -}}
{{- end -}}

{{/* Whether services fetch the model from a hub: no weights are mounted, and the uri is no path. */}}
{{- define "millrace.usesHub" -}}
{{- if and .Values.model.uri (not (hasPrefix "/" .Values.model.uri)) }}true{{ end -}}
{{- end -}}

{{/* Secret with the key `url` of Redis. */}}
{{- define "millrace.redisSecret" -}}
{{- if .Values.redis.enabled -}}
{{ .Values.redis.existingSecret | default (printf "%s-redis" (include "millrace.name" .)) }}
{{- else -}}
{{ .Values.externalRedis.existingSecret | default (printf "%s-redis" (include "millrace.name" .)) }}
{{- end -}}
{{- end -}}

{{/* true if the Secret of Redis has a URL for each service, and users.acl for the chart's Redis. */}}
{{- define "millrace.redisPerService" -}}
{{- if .Values.redis.enabled -}}
{{ .Values.redis.perServiceUsers }}
{{- else -}}
{{ .Values.externalRedis.perServiceUsers }}
{{- end -}}
{{- end -}}

{{/* Secret with ca.crt, tls.crt and tls.key of all services; empty without TLS. */}}
{{- define "millrace.tlsSecret" -}}
{{- if .Values.tls.enabled -}}
{{ .Values.tls.existingSecret | default (printf "%s-tls" (include "millrace.name" .)) }}
{{- end -}}
{{- end -}}

{{/* DNS names in the certificate of all services. Pods have no names that last: clients check the
     first name. */}}
{{- define "millrace.tlsNames" -}}
- millrace.internal
- {{ include "millrace.name" . }}-redis.{{ .Release.Namespace }}.svc
{{- end -}}

{{/* What Pod Security's `restricted` asks of a container. */}}
{{- define "millrace.restricted" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* And of a pod: dict "uid" NUMBER */}}
{{- define "millrace.restrictedPod" -}}
runAsNonRoot: true
runAsUser: {{ .uid }}
runAsGroup: {{ .uid }}
fsGroup: {{ .uid }}
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{/* Where a pod goes: dict "part" VALUES; what stands in a pod's spec whatever it runs. */}}
{{- define "millrace.placement" -}}
{{- range $field := list "nodeSelector" "affinity" "tolerations" "priorityClassName" "runtimeClassName" }}
{{- with get $.part $field }}
{{ $field }}: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Of the release's PriorityClass, which is cluster-wide: releases of one name may live in several namespaces. */}}
{{- define "millrace.priorityClass" -}}
{{ include "millrace.name" . }}-{{ .Release.Namespace }}
{{- end -}}

{{/* The operator's account. */}}
{{- define "millrace.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (printf "%s-operator" (include "millrace.name" .)) -}}
{{- end -}}
