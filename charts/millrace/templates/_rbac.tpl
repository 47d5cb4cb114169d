{{/* What is cluster-wide carries the namespace in its name: releases of one name may live in several. */}}
{{- define "millrace.clusterName" -}}
{{ include "millrace.name" . }}-operator-{{ .Release.Namespace }}
{{- end -}}

{{- define "millrace.subjects" -}}
- kind: ServiceAccount
  name: {{ include "millrace.serviceAccount" . }}
  namespace: {{ .Release.Namespace }}
{{- end -}}

{{/* The operator's rights, each with its use. `patch` is server-side apply, which needs `create` too for
     what is not there yet. */}}
{{- define "millrace.rules" -}}
# Read, and watched for changes.
- apiGroups: [millrace.dev]
  resources: [modelservices]
  verbs: [get, list, watch]
# Pools are made of a ModelService, and removed when it no longer names them.
- apiGroups: [millrace.dev]
  resources: [prefillgroups, decodepools, kvpworkerpools]
  verbs: [get, list, watch, create, patch, delete]
# What the operator says of them.
- apiGroups: [millrace.dev]
  resources: [modelservices/status, prefillgroups/status, decodepools/status, kvpworkerpools/status]
  verbs: [patch]
# Autoscaling, the way an HPA does it.
- apiGroups: [millrace.dev]
  resources: [prefillgroups/scale, decodepools/scale, kvpworkerpools/scale]
  verbs: [patch]
# What pools and services are made of. It goes with its owner; the operator itself deletes a StatefulSet or a
# LeaderWorkerSet of one instance, whose stages have pods of their own, once the instance has drained.
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, watch, create, patch]
- apiGroups: [apps]
  resources: [statefulsets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [leaderworkerset.x-k8s.io]
  resources: [leaderworkersets]
  verbs: [get, list, create, patch, delete]
- apiGroups: [""]
  resources: [services, configmaps]
  verbs: [get, list, create, patch]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, create, patch]
# Which instances are ready; drained old ones are deleted, and come back from the new template. The pod of a
# first stage is read again before it gets those of later stages.
- apiGroups: [""]
  resources: [pods]
  verbs: [get, list, watch, delete]
# Room for growth.
- apiGroups: [""]
  resources: [resourcequotas]
  verbs: [list]
# What people read in `kubectl describe`.
- apiGroups: [events.k8s.io]
  resources: [events]
  verbs: [create]
{{- end -}}
