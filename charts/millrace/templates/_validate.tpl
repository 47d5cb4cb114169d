{{/* What a schema can't say, or only unclearly. */}}
{{- define "millrace.validate" -}}
{{- $v := .Values -}}
{{- if include "millrace.serves" . -}}
{{- if not $v.model.name -}}
{{- fail "model.name is empty: give the name that clients ask for" -}}
{{- end -}}
{{- $mounted := or $v.weights.persistentVolumeClaim $v.weights.hostPath $v.weights.image -}}
{{- if and $mounted (include "millrace.usesHub" .) -}}
{{- fail (printf "model.uri is the hub id %q, but weights mounts files at /models: give the path of the model there" $v.model.uri) -}}
{{- end -}}
{{- if and $v.weights.hub (not (include "millrace.usesHub" .)) -}}
{{- fail (printf "weights.hub is for a hub id, but model.uri is the path %q" $v.model.uri) -}}
{{- end -}}
{{- if and (hasPrefix "/models" $v.model.uri) (not $mounted) -}}
{{- fail (printf "model.uri is %q, but weights mounts nothing at /models: give one of persistentVolumeClaim, hostPath, image" $v.model.uri) -}}
{{- end -}}
{{- $keys := $v.gateway.keys -}}
{{- $stored := eq (get ($v.settings | default dict) "auth.stored_keys" | toString) "on" -}}
{{- if and $keys.required (not $keys.secretRef) (not $v.tenants) (not $stored) -}}
{{- fail "gateway.keys.required is true, but nobody has a key: give gateway.keys.secretRef, tenants, or the setting auth.stored_keys: on" -}}
{{- end -}}
{{- $watched := $v.operator.watchNamespaces -}}
{{- if and $v.operator.enabled $watched (not (has .Release.Namespace $watched)) -}}
{{- fail (printf "operator.watchNamespaces lacks %s, where the ModelService is made" .Release.Namespace) -}}
{{- end -}}
{{- else if or $v.ingress.enabled $v.httpRoute.enabled -}}
{{- fail "ingress and httpRoute need a gateway: give model.uri" -}}
{{- end -}}
{{- if and $v.operator.enabled (not $v.operator.watchNamespaces) -}}
{{- /* Two operators of all namespaces would undo each other's work for ever. */ -}}
{{- range (lookup "rbac.authorization.k8s.io/v1" "ClusterRole" "" "").items -}}
{{- $labels := .metadata.labels | default dict -}}
{{- $is := and (eq (get $labels "app.kubernetes.io/name") "millrace") (eq (get $labels "app.kubernetes.io/component") "operator") -}}
{{- if and $is (not (hasSuffix "-crds" .metadata.name)) (ne .metadata.name (include "millrace.clusterName" $)) -}}
{{- fail (printf "operator.enabled is true, but the operator of release %s serves all namespaces already (ClusterRole %s): set operator.enabled to false here, or give operator.watchNamespaces in both" (get $labels "app.kubernetes.io/instance") .metadata.name) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if and $v.httpRoute.enabled (not $v.httpRoute.parentRefs) -}}
{{- fail "httpRoute.parentRefs is empty: name the Gateway" -}}
{{- end -}}
{{- if and (not $v.redis.enabled) (not $v.externalRedis.url) (not $v.externalRedis.existingSecret) -}}
{{- fail "redis.enabled is false: give externalRedis.url or externalRedis.existingSecret" -}}
{{- end -}}
{{- if and $v.redis.enabled (or $v.externalRedis.url $v.externalRedis.existingSecret) -}}
{{- fail "externalRedis is given, but redis.enabled is true: set it to false" -}}
{{- end -}}
{{- if and $v.externalRedis.url $v.externalRedis.existingSecret -}}
{{- fail "externalRedis takes one of url and existingSecret" -}}
{{- end -}}
{{- if $v.redis.enabled -}}
{{- $limit := get ($v.redis.resources.limits | default dict) "memory" -}}
{{- if kindIs "float64" $limit }}{{ $limit = int64 $limit }}{{ end -}}
{{- $limit = toString $limit -}}
{{- $most := include "millrace.bytes" $v.redis.maxmemory | float64 -}}
{{- if and $most $limit (ge $most (include "millrace.bytes" $limit | float64)) -}}
{{- fail (printf "redis.maxmemory is %s, but redis.resources.limits.memory is %s: at that limit Kubernetes kills Redis, which then reads the same data again; keep maxmemory below it" $v.redis.maxmemory $limit) -}}
{{- end -}}
{{- end -}}
{{- if and $v.externalRedis.perServiceUsers (not $v.externalRedis.existingSecret) -}}
{{- fail "externalRedis.perServiceUsers is true: give externalRedis.existingSecret" -}}
{{- end -}}
{{- if and $v.tls.existingSecret $v.tls.certManager.enabled -}}
{{- fail "tls takes one of existingSecret and certManager" -}}
{{- end -}}
{{- if and (not $v.tls.enabled) (or $v.tls.existingSecret $v.tls.certManager.enabled) -}}
{{- fail "tls.enabled is false, but tls.existingSecret or tls.certManager is given" -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- with get $v $role -}}
{{- $onCpus := and (hasKey . "gpus") (eq (int .gpus) 0) -}}
{{- $stages := int (.stages | default 1) -}}
{{- $ranks := int (.tensorParallel | default 1) -}}
{{- if and (hasKey . "gpus") (not $onCpus) (lt (int .gpus) (mul $ranks $stages)) -}}
{{- fail (printf "%s.gpus is %d, but %s.tensorParallel is %d and %s.stages %d: each rank of each stage needs a GPU" $role (int .gpus) $role $ranks $role $stages) -}}
{{- end -}}
{{- if eq (.stagePods | default "Shared") "Own" -}}
{{- if lt $stages 2 -}}
{{- fail (printf "%s.stagePods is Own, but %s.stages is %d: an instance of one stage has one pod" $role $role $stages) -}}
{{- end -}}
{{- if and (hasKey . "gpus") (mod (int .gpus) $stages) -}}
{{- fail (printf "%s.stagePods is Own, but %s.gpus is %d and %s.stages %d: each pod gets the same number, so gpus must be divisible by stages" $role $role (int .gpus) $role $stages) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $role := list "prefill" "decode" "kvp" -}}
{{- with get $v $role -}}
{{- if .hugepages -}}
{{- if not (and .hugepages.size .hugepages.amount) -}}
{{- fail (printf "%s.hugepages needs size and amount" $role) -}}
{{- end -}}
{{- $requests := .resources.requests | default dict -}}
{{- if not (or $requests.cpu $requests.memory) -}}
{{- fail (printf "%s.hugepages: Kubernetes wants a request of CPU or memory with it: give %s.resources.requests" $role $role) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Bytes of a quantity of Kubernetes' (4Gi) or of Redis' (3gb; k, m and g of Redis' are decimal). */}}
{{- define "millrace.bytes" -}}
{{- $units := dict "" 1 "k" 1000 "m" 1000000 "g" 1000000000 "kb" 1024 "mb" 1048576 "gb" 1073741824 -}}
{{- $units = merge $units (dict "M" 1000000 "G" 1000000000 "T" 1000000000000 "P" 1000000000000000) -}}
{{- $units = merge $units (dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624) -}}
{{- mulf (regexFind "^[0-9.]+" . | default "0" | float64) (get $units (regexReplaceAll "^[0-9.]+" . "") | default 1 | float64) | int64 -}}
{{- end -}}
