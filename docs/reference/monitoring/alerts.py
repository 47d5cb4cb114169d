"""Makes the chart's recording rules and alerts, a Helm template, from the table of metrics."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from docs.reference.metrics_in_code import Metric
from docs.reference.monitoring.queries import Queries

#: Windows of the share of misses. A budget burns too fast where the share is high over a long
#: window and over a short one (Google's SRE workbook, chapter 5).
_WINDOWS = ("5m", "30m", "1h", "6h", "3d")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """A promise to a request, as a counter with the labels `slo_class` and `met` counts it.

    `matchers` choose the counter's series. `missed` says in an alert what the requests do.
    """

    name: str
    counter: str
    matchers: str
    missed: str

    @property
    def record(self) -> str:
        """The recording rules' name, without its window."""
        return f"slo_class:millrace_{self.name}_missed:ratio_rate"

    @property
    def attainment(self) -> str:
        """The chart's value with the share of requests that are to meet the objective."""
        return f"$alerts.{self.name}Attainment"


@dataclass(frozen=True, slots=True, kw_only=True)
class Burn:
    """An alert of a budget of misses, which `burns` times as fast as it may."""

    name: str
    burns: float
    long: str
    short: str
    severity: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """An alert; `@` in `expr` stands for the selector, and texts may hold Helm's braces."""

    name: str
    expr: str
    minutes: int
    severity: str
    summary: str
    description: str


OBJECTIVES = (
    # The scheduler counts at the first token; the proxy when the request has ended.
    Objective(
        name="ttft",
        counter="millrace_scheduler_slo_requests_total",
        matchers="@",
        missed="First tokens of class CLASS come late",
    ),
    Objective(
        name="tbt",
        counter="millrace_proxy_slo_requests_total",
        matchers='@,objective="tbt"',
        missed="Answers of class CLASS are slower from token to token than promised",
    ),
    Objective(
        name="e2e",
        counter="millrace_proxy_slo_requests_total",
        matchers='@,objective="e2e"',
        missed="Answers of class CLASS end late",
    ),
)

BURNS = (
    Burn(name="BurnsFast", burns=14.4, long="1h", short="5m", severity="critical"),
    Burn(name="Burns", burns=6.0, long="6h", short="30m", severity="critical"),
    Burn(name="BurnsSlowly", burns=1.0, long="3d", short="6h", severity="warning"),
)

_PREFILLS = '{{ ternary "mixed" "prefill|decode" (eq .Values.decode.role "mixed") | quote }}'

SERVICE = (
    Alert(
        name="MillraceRequestsRefused",
        expr="sum by (code) (rate(millrace_scheduler_refused_requests_total{@}[5m])) > 0",
        minutes=10,
        severity="warning",
        summary="The scheduler refuses requests ({{ $labels.code }}).",
        description="Queues are full. Raise the pools' maxReplicas, or "
        "scheduler.max_queue_requests and max_queue_s.",
    ),
    Alert(
        name="MillraceSchedulerAbsent",
        expr="absent(millrace_scheduler_live_requests{@})",
        minutes=5,
        severity="critical",
        summary="No scheduler tells of itself.",
        description="Without it no request starts. kubectl describe deploy NAME-scheduler",
    ),
    Alert(
        name="MillraceNoInstances",
        expr="min by (role) (millrace_scheduler_fleet_instances{@,role=~ROLES}) == 0\n"
        "  and on () sum(millrace_scheduler_queued_requests{@}) > 0",
        minutes=10,
        severity="critical",
        summary="Requests wait, and no {{ $labels.role }} instance takes work.",
        description="kubectl get millrace -o wide tells why pods do not start.",
    ),
    Alert(
        name="MillraceKvFull",
        expr='sum(millrace_kv_used_pages{@,app_kubernetes_io_component="decode"})\n'
        '  / sum(millrace_kv_used_pages{@,app_kubernetes_io_component="decode"}\n'
        '      + millrace_kv_free_pages{@,app_kubernetes_io_component="decode"})\n'
        "  > 0.95",
        minutes=15,
        severity="warning",
        summary="The decode pool's KV memory is full.",
        description="Requests wait for room. Raise the decode pool's maxReplicas.",
    ),
    Alert(
        name="MillraceTransfersFail",
        expr='sum(increase(millrace_prefill_failed_requests_total{@,reason="transfer"}[15m])) > 0',
        minutes=15,
        severity="warning",
        summary="Transfers of KV between instances fail.",
        description="Look at the network between the pools (UCX_NET_DEVICES, RDMA, "
        "NetworkPolicies) and at the workers' logs.",
    ),
    Alert(
        name="MillraceStatesNotWritten",
        expr="sum(millrace_scheduler_unwritten_requests{@}) > 100",
        minutes=5,
        severity="warning",
        summary="Redis does not take the states of requests.",
        description="New requests get 503 without it. kubectl describe sts NAME-redis",
    ),
)

OPERATOR = (
    Alert(
        name="MillraceOperatorAbsent",
        expr="absent(millrace_operator_leader_info{@} == 1)",
        minutes=10,
        severity="critical",
        summary="No operator acts.",
        description="Requests are served, but pools keep their size and their pods. kubectl "
        "describe deploy NAME-operator",
    ),
    Alert(
        name="MillraceReconcilesFail",
        expr="sum by (kind, result) "
        '(rate(millrace_operator_reconcile_rounds_total{@,result!="done"}[15m])) > 0',
        minutes=15,
        severity="warning",
        summary="The operator can't bring a {{ $labels.kind }} to what it is to be.",
        description="Its log and the object's conditions say why.",
    ),
    Alert(
        name="MillraceSchedulerSilent",
        expr="sum(increase(millrace_operator_scheduler_errors_total{@}[10m])) > 0",
        minutes=10,
        severity="warning",
        summary="A scheduler does not answer the operator.",
        description="Its pools neither shrink nor grow. Look at the NetworkPolicy between them "
        "and, with TLS, at the certificates.",
    ),
)

_HEAD = """\
{{- /* `make docs-pages` writes this file from docs/reference/monitoring/alerts.py. */}}
{{- if .Values.monitoring.alerts.enabled }}
{{- $alerts := .Values.monitoring.alerts }}
{{- $name := include "millrace.name" . }}
{{- $of := printf "namespace=%q,millrace_dev_service=%q" .Release.Namespace $name }}
{{- $ofOperator := printf "namespace=%q" .Release.Namespace }}
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: {{ $name }}
  namespace: {{ .Release.Namespace }}
  labels:
    {{- include "millrace.labels" (dict "root" . "component" "monitoring") | nindent 4 }}
    {{- with $alerts.labels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  groups:
    {{- if include "millrace.serves" . }}
    - name: millrace-slo
      rules:"""

_SUMMARY = "{missed} {burns:g} times as often as the objective of {attainment} (share) allows."
_WHERE = (
    "Look at the dashboard's queue, then at the trace of a late request, as the guide on "
    "observability shows."
)


def template(metrics: Sequence[Metric]) -> str:
    """charts/millrace/templates/alerts.yaml.

    Raises ValueError for a metric or a label that is not in the table.
    """
    # "{{{" would be no template: Helm takes the space away.
    service, operator = Queries(metrics, " {{- $of }}"), Queries(metrics, " {{- $ofOperator }}")
    lines = [_HEAD]
    for objective in OBJECTIVES:
        for window in _WINDOWS:
            lines += _recorded(objective, service, window)
        for burn in BURNS:
            lines += _burning(objective, burn)
    lines += ["    - name: millrace-service", "      rules:"]
    for alert in SERVICE:
        lines += _alert(alert, service)
    lines += ["    {{- end }}", "    {{- if .Values.operator.enabled }}"]
    lines += ["    - name: millrace-operator", "      rules:"]
    for alert in OPERATOR:
        lines += _alert(alert, operator)
    return "\n".join([*lines, "    {{- end }}", "{{- end }}", ""])


def _recorded(objective: Objective, queries: Queries, window: str) -> Iterator[str]:
    """The share of requests by class that missed the objective."""
    total = f"sum by (slo_class) (rate({objective.counter}{{%s}}[{window}]))"
    missed = queries.checked(total % f'{objective.matchers},met="false"')
    every = queries.checked(total % objective.matchers)
    yield f"        - record: {objective.record}{window}"
    yield from _expression(f"{missed}\n  / {every}")
    yield "          labels:"
    yield "            namespace: {{ .Release.Namespace | quote }}"
    yield "            millrace_dev_service: {{ $name | quote }}"


def _burning(objective: Objective, burn: Burn) -> Iterator[str]:
    # No threshold is above 0.9: of a small objective, many budgets are more than all requests.
    most = f"{{{{ minf 0.9 (mulf {burn.burns} (subf 1.0 {objective.attainment})) | toString }}}}"
    parts = [
        f"{objective.record}{window}{{ {{{{- $of }}}}}} > {most}"
        for window in (burn.long, burn.short)
    ]
    summary = _SUMMARY.format(
        missed=objective.missed.replace("CLASS", "{{ $labels.slo_class }}"),
        burns=burn.burns,
        attainment="ATTAINMENT",
    )
    yield f"        - alert: Millrace{objective.name.capitalize()}Budget{burn.name}"
    yield from _expression("\n  and ".join(parts))
    yield f"          labels: {{severity: {burn.severity}}}"
    yield "          annotations:"
    yield "            summary: " + _text(summary).replace(
        "ATTAINMENT", f"{{{{ {objective.attainment} }}}}"
    )
    yield f"            description: Over {burn.long} and still over {burn.short}. {_WHERE}"


def _alert(alert: Alert, queries: Queries) -> Iterator[str]:
    expr = queries.checked(alert.expr).replace("ROLES", _PREFILLS)
    yield f"        - alert: {alert.name}"
    yield from _expression(expr)
    yield f"          for: {alert.minutes}m"
    yield f"          labels: {{severity: {alert.severity}}}"
    yield "          annotations:"
    yield f"            summary: {_text(alert.summary)}"
    yield f"            description: {_text(alert.description)}"


def _expression(expr: str) -> Iterator[str]:
    first, *rest = expr.splitlines()
    if not rest:
        yield f"          expr: {first}"
        return
    yield "          expr: |"
    yield from (f"            {line}" for line in (first, *rest))


def _text(text: str) -> str:
    """Returns a text of a template: Prometheus fills in its own braces, Helm the others."""
    kept = text.replace("{{ $labels", "\0").replace("}}", "\1")
    kept = kept.replace("\0", '{{ "{{ $labels').replace("\1", '}}" }}')
    return kept.replace("NAME", "{{ $name }}")
