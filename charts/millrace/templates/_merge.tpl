{{/* Merges the fields of "over" into "base", in place: mappings key by key, lists by the names of their entries where
     they have one, other lists whole. The operator merges templates by the same rule (manifests/templates.py).
     dict "base" MAPPING "over" MAPPING */}}
{{- define "millrace.merge" -}}
{{- $keys := dict "containers" "name" "initContainers" "name" "env" "name" "ports" "name" "volumes" "name" -}}
{{- $keys = merge $keys (dict "volumeMounts" "mountPath" "volumeDevices" "devicePath" "imagePullSecrets" "name" "hostAliases" "ip") -}}
{{- $base := .base -}}
{{- range $field, $value := .over -}}
{{- $own := get $base $field -}}
{{- if and (kindIs "map" $own) (kindIs "map" $value) -}}
{{- include "millrace.merge" (dict "base" $own "over" $value) -}}
{{- else if and (hasKey $keys $field) (kindIs "slice" $own) (kindIs "slice" $value) -}}
{{- include "millrace.mergeList" (dict "base" $base "field" $field "over" $value "key" (get $keys $field)) -}}
{{- else -}}
{{- $_ := set $base $field $value -}}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Merges a list of entries that "key" tells apart into the list "field" of "base". An entry of the same key replaces
     the earlier entry, but containers are merged. Entries that have no key are refused later, by the operator. */}}
{{- define "millrace.mergeList" -}}
{{- $key := .key -}}
{{- $deep := has .field (list "containers" "initContainers") -}}
{{- $result := get .base .field -}}
{{- range $entry := .over -}}
{{- $at := -1 -}}
{{- range $index, $own := $result -}}
{{- if and (kindIs "map" $entry) (eq (get $own $key | toString) (get $entry $key | toString)) -}}{{- $at = $index -}}{{- end -}}
{{- end -}}
{{- if lt $at 0 -}}
{{- $result = append $result $entry -}}
{{- else if $deep -}}
{{- include "millrace.merge" (dict "base" (index $result $at) "over" $entry) -}}
{{- else -}}
{{- $result = concat (slice $result 0 $at) (list $entry) (slice $result (add1 $at)) -}}
{{- end -}}
{{- end -}}
{{- $_ := set .base .field $result -}}
{{- end -}}
