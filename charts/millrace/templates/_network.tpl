{{/* Peers: pods of the release's ModelService. dict "root" . "components" LIST */}}
{{- define "millrace.peers" -}}
- podSelector:
    matchLabels:
      millrace.dev/service: {{ include "millrace.name" .root }}
    matchExpressions:
      - {key: app.kubernetes.io/component, operator: In, values: [{{ join ", " .components }}]}
{{- end -}}

{{/* Peers: proxies of other ModelServices that serve this release's model. */}}
{{- define "millrace.gatewayPeers" -}}
{{- with .Values.networkPolicy.gateways -}}
- podSelector:
    matchLabels: {app.kubernetes.io/component: proxy}
    matchExpressions:
      - {key: millrace.dev/service, operator: In, values: {{ toJson . }}}
{{- end -}}
{{- end -}}

{{- define "millrace.dnsRule" -}}
{{- with .Values.networkPolicy.dns -}}
- ports:
    {{- range .ports }}
    - {protocol: UDP, port: {{ . }}}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
  {{- with .peers }}
  to: {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
{{- end -}}

{{/* To the chart's Redis; one elsewhere may have any address and port. */}}
{{- define "millrace.redisRule" -}}
{{- if .Values.redis.enabled -}}
- ports: [{protocol: TCP, port: 6379}]
  to:
    - podSelector:
        matchLabels: {{- include "millrace.selector" (dict "root" . "component" "redis") | nindent 10 }}
{{- else -}}
- ports:
    {{- range include "millrace.externalRedisPorts" . | fromJsonArray }}
    - {protocol: TCP, port: {{ . }}}
    {{- end }}
{{- end -}}
{{- end -}}

{{/* JSON list: as given, else of the URL where the chart knows it. Sentinels name servers of any port. */}}
{{- define "millrace.externalRedisPorts" -}}
{{- $external := .Values.externalRedis -}}
{{- $sentinel := regexMatch "^rediss?[+]sentinel:" $external.url -}}
{{- $ports := list -}}
{{- range splitList "," (regexReplaceAll "^[^:]*://([^/?]*@)?([^/?]*).*$" $external.url "${2}") -}}
{{- $port := regexFind ":[0-9]+$" . | trimPrefix ":" -}}
{{- $ports = append $ports ($port | default (ternary "26379" "6379" $sentinel) | int) -}}
{{- end -}}
{{- if $sentinel }}{{ $ports = append $ports 6379 }}{{ end -}}
{{ $external.ports | default $ports | uniq | toJson }}
{{- end -}}
