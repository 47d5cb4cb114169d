"""Makes the chart's Grafana dashboards from the table of metrics.

`serving` and `operator` choose what to look at first. `metrics` has a panel of every metric in the
table. A panel that says nothing else about itself has the help text of its first metric.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from docs.reference.metrics_in_code import Metric
from docs.reference.monitoring.queries import Queries, Query

Json = dict[str, Any]

_SERVICE = 'namespace="$namespace",millrace_dev_service="$service"'
_NAMESPACE = 'namespace="$namespace"'
_SOURCE = {"type": "prometheus", "uid": "$datasource"}
_WIDTH, _HEIGHT = 24, 8
_STACKED = {"fillOpacity": 30, "stacking": {"mode": "normal", "group": "A"}}


@dataclass(frozen=True, slots=True)
class Panel:
    """A picture of some queries. `most` is the top of its axis, None: of its values."""

    title: str
    queries: Sequence[Query]
    note: str = ""
    stacked: bool = False
    most: float | None = None


#: Panels under their titles.
Rows = Mapping[str, Sequence[Panel]]


def serving(metrics: Sequence[Metric]) -> str:
    """charts/millrace/dashboards/serving.json."""
    q = Queries(metrics, _SERVICE)
    rows = {
        "What clients see": _clients(q),
        "Scheduler": _scheduler(q),
        "Prefill": _prefill(q),
        "Decode": _decode(q),
        "Mixed": _mixed(q),
    }
    said = "What clients see, what waits, and what every pool does."
    return _dashboard("serving", said, _variables("millrace_scheduler_live_requests"), rows)


def operator(metrics: Sequence[Metric]) -> str:
    """charts/millrace/dashboards/operator.json."""
    q = Queries(metrics, _NAMESPACE)
    recommended = q.now(
        "millrace_operator_recommended_instances", "kind", "pool", legend="{{pool}}", most=True
    )
    rows = {
        "Autoscaling": [
            Panel("Recommended instances", [recommended]),
            Panel(
                "Sizes set", [q.increase("millrace_operator_scale_changes_total", *_POOL_CHANGE)]
            ),
        ],
        "Operator": [
            Panel(
                "Leader",
                [q.each("millrace_operator_leader_info", "{{pod}}")],
                "1 for the one that acts.",
                most=1,
            ),
            Panel("Reconciles", [q.rate("millrace_operator_reconcile_rounds_total", *_ROUND)]),
            Panel(
                "Time of a reconcile",
                [q.quantile(0.99, "millrace_operator_reconcile_seconds", "kind")],
            ),
            Panel(
                "Errors of the API server",
                [q.rate("millrace_operator_api_errors_total", "verb", "status")],
            ),
            Panel(
                "Schedulers that did not answer",
                [q.rate("millrace_operator_scheduler_errors_total", legend="calls")],
            ),
            Panel("Waiting objects", [q.now("millrace_operator_waiting_tasks", legend="objects")]),
        ],
    }
    said = "What the operator recommends and does."
    variables = _variables("millrace_operator_leader_info", of_service=False)
    return _dashboard("operator", said, variables, rows)


_POOL_CHANGE = ("pool", "direction")
_ROUND = ("kind", "result")


def everything(metrics: Sequence[Metric], areas: Mapping[str, str]) -> str:
    """charts/millrace/dashboards/metrics.json. `areas` are the sections of the table."""
    service, namespace = Queries(metrics, _SERVICE), Queries(metrics, _NAMESPACE)
    rows: dict[str, list[Panel]] = {}
    for area, said in areas.items():
        q = namespace if area == "operator" else service
        rows[f"{area}: {said}" if area != "ROLE" else said] = [
            Panel(_title(one), q.all_of(one)) for one in metrics if one.name.split("_")[1] == area
        ]
    said = "Every metric: a counter as its rate, a histogram as its median and 99th percentile."
    variables = _variables("millrace_scheduler_live_requests")
    return _dashboard("metrics", said, variables, rows, collapsed=True)


def _title(metric: Metric) -> str:
    """`millrace_kv_free_pages` -> "free pages"; the row names the area."""
    words = metric.name.removesuffix("_total").split("_")[2:]
    return " ".join(words)


# ---- what to look at first


def _clients(q: Queries) -> list[Panel]:
    slo = "millrace_scheduler_slo_requests_total"
    in_time = (
        f'sum by (slo_class) (rate({slo}{{@,met="true"}}[5m])) / '
        f"sum by (slo_class) (rate({slo}{{@}}[5m]))"
    )
    return [
        Panel(
            "First tokens in time",
            [q.written(in_time, "{{slo_class}}", "percentunit")],
            "Share of requests with a TTFT objective that met it, by class, over five minutes.",
            most=1,
        ),
        Panel(
            "Time to first token",
            q.quantiles("millrace_proxy_ttft_seconds", "slo_class"),
            "From a request's arrival at the proxy.",
        ),
        Panel("Time between tokens", q.quantiles("millrace_proxy_tbt_seconds")),
        Panel(
            "Requests by answer",
            [q.rate("millrace_proxy_http_requests_total", "code")],
            stacked=True,
        ),
        Panel(
            "Tokens",
            [
                q.rate("millrace_proxy_prompt_tokens_total", legend="prompt"),
                q.rate("millrace_proxy_generated_tokens_total", legend="generated"),
            ],
            "Per second.",
        ),
        Panel(
            "Open requests",
            [
                q.now("millrace_proxy_inflight_requests", legend="open"),
                q.now("millrace_scheduler_queued_requests", legend="queued"),
                q.now("millrace_proxy_parked_requests", legend="parked"),
            ],
            "Parked: they wait at the proxy for a pool that starts.",
        ),
    ]


def _scheduler(q: Queries) -> list[Panel]:
    ended = q.rate(
        "millrace_scheduler_ended_requests_total",
        "state",
        where='state!="finished"',
        legend="ended: {{state}}",
    )
    return [
        Panel(
            "Queued work",
            [q.now("millrace_scheduler_queued_seconds", legend="predicted seconds")],
            "Predicted prefill time of what no prefill instance has.",
        ),
        Panel("Instances that take work", [q.now("millrace_scheduler_fleet_instances", "role")]),
        Panel(
            "Refused and failed",
            [
                q.rate(
                    "millrace_scheduler_refused_requests_total", "code", legend="refused: {{code}}"
                ),
                ended,
            ],
        ),
        Panel("Time of a decision", q.quantiles("millrace_scheduler_step_seconds")),
        Panel(
            "Predicted over real TTFT",
            [q.quantile(0.5, "millrace_scheduler_predicted_ttft_ratio")],
            "1 where the latency model fits; below 1 first tokens are later than predicted.",
        ),
        Panel(
            "States that Redis lacks",
            [q.now("millrace_scheduler_unwritten_requests", legend="requests")],
        ),
    ]


def _prefill(q: Queries) -> list[Panel]:
    return [
        Panel(
            "Computed tokens",
            [q.rate("millrace_prefill_computed_tokens_total", "pod")],
            "Prompt tokens per second.",
            stacked=True,
        ),
        Panel(
            "At prefill instances",
            [
                q.now("millrace_prefill_running_requests", legend="running"),
                q.now("millrace_prefill_waiting_requests", legend="waiting"),
                q.now("millrace_prefill_suspended_tasks", legend="suspended"),
            ],
        ),
        Panel(
            "Sent KV",
            [
                q.rate("millrace_prefill_sent_bytes_total", legend="to decode"),
                q.rate("millrace_prefill_ring_bytes_total", legend="within groups"),
            ],
        ),
        Panel("Transfer of a request's KV", q.quantiles("millrace_prefill_transfer_seconds")),
        Panel(
            "Stopping for a more urgent one",
            [q.quantile(0.99, "millrace_prefill_preemption_blocking_seconds")],
        ),
        Panel("Failed prefills", [q.rate("millrace_prefill_failed_requests_total", "reason")]),
    ]


def _decode(q: Queries) -> list[Panel]:
    used, free = "millrace_kv_used_pages{@}", "millrace_kv_free_pages{@}"
    return [
        Panel(
            "KV memory in use",
            [q.written(f"{used} / ({used} + {free})", "{{pod}}", "percentunit")],
            "Share of an instance's pages.",
            most=1,
        ),
        Panel("A decode step", q.quantiles("millrace_decode_step_seconds")),
        Panel("Sequences in a step", q.quantiles("millrace_decode_batch_sequences")),
        Panel(
            "Generated tokens",
            [q.rate("millrace_decode_generated_tokens_total", "pod")],
            "Per second.",
            stacked=True,
        ),
        Panel(
            "At decode instances",
            [
                q.now("millrace_decode_running_requests", legend="running"),
                q.now("millrace_decode_waiting_requests", legend="waiting"),
            ],
        ),
        Panel("Failed in decode", [q.rate("millrace_decode_failed_requests_total", "reason")]),
    ]


def _mixed(q: Queries) -> list[Panel]:
    return [
        Panel(
            "An iteration with prompts",
            [
                *q.quantiles("millrace_mixed_iteration_seconds"),
                q.quantile(0.99, "millrace_mixed_predicted_seconds", legend="p99, predicted"),
            ],
            "A forward pass of mixed instances that has chunks of prompts.",
        ),
        Panel(
            "Prompt tokens",
            [q.sum_rate("millrace_mixed_chunk_tokens", "pod")],
            "Per second, computed by mixed instances.",
        ),
        Panel(
            "Measured over predicted time",
            q.quantiles("millrace_mixed_measured_to_predicted_ratio"),
            "Of an iteration; 1 is a perfect guess.",
        ),
        Panel(
            "At mixed instances",
            [
                q.now("millrace_mixed_running_requests", legend="running"),
                q.now("millrace_mixed_waiting_requests", legend="waiting"),
            ],
        ),
    ]


# ---- Grafana's JSON


def _dashboard(
    name: str, said: str, variables: list[Json], rows: Rows, *, collapsed: bool = False
) -> str:
    document = {
        "uid": f"millrace-{name}",
        "title": f"Millrace: {name}",
        "description": said,
        "tags": ["millrace"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "refresh": "30s",
        "editable": True,
        "time": {"from": "now-3h", "to": "now"},
        "templating": {"list": variables},
        "panels": list(_panels(rows, collapsed=collapsed)),
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _variables(series: str, *, of_service: bool = True) -> list[Json]:
    """The data source and what is chosen of it, from the labels of `series`."""
    source = {"name": "datasource", "label": "Data source", "type": "datasource"}
    found = [
        {**source, "query": "prometheus"},
        _variable("namespace", "Namespace", f"label_values({series}, namespace)"),
    ]
    if of_service:
        inside = f"label_values({series}{{{_NAMESPACE}}}, millrace_dev_service)"
        found.append(_variable("service", "Service", inside))
    return found


def _variable(name: str, label: str, query: str) -> Json:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": query, "refId": name},
        "refresh": 2,
        "sort": 1,
    }


def _panels(rows: Rows, *, collapsed: bool) -> Iterator[Json]:
    """Yields rows and their panels, three or two side by side; a closed row holds its own."""
    number, y = 1, 0
    for title, panels in rows.items():
        row = {"id": number, "type": "row", "title": title, "collapsed": collapsed}
        place = {"h": 1, "w": _WIDTH, "x": 0, "y": y}
        number, y = number + 1, y + 1
        width = _WIDTH // min(3, max(2, len(panels)))
        across = _WIDTH // width
        made = []
        for index, panel in enumerate(panels):
            at = {
                "h": _HEIGHT,
                "w": width,
                "x": index % across * width,
                "y": y + index // across * _HEIGHT,
            }
            made.append(_panel(panel, number, at))
            number += 1
        if not collapsed:
            y += -(-len(panels) // across) * _HEIGHT
        yield {**row, "gridPos": place, "panels": made if collapsed else []}
        if not collapsed:
            yield from made


def _panel(panel: Panel, number: int, at: Json) -> Json:
    first = panel.queries[0]
    axis: Json = {"unit": first.unit, "min": 0}
    if panel.most is not None:
        axis["max"] = panel.most
    if panel.stacked:
        axis["custom"] = _STACKED
    said = first.help.removesuffix(".")
    help_text = f"{said[:1].upper()}{said[1:]}." if said else ""
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.note or help_text,
        "datasource": _SOURCE,
        "gridPos": at,
        "fieldConfig": {"defaults": axis, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "expr": one.expr, "legendFormat": one.legend}
            for index, one in enumerate(panel.queries)
        ],
    }
