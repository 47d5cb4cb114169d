"""Reads metrics in Prometheus' text format, by Prometheus' own parser."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from millrace.telemetry.metrics import Registry


def total(metrics: Registry | str, name: str, **labels: str) -> float:
    """Returns the sum of a metric's series with these labels; 0 without any.

    `metrics` is a registry, or the answer to a GET of /metrics.
    """
    text = metrics if isinstance(metrics, str) else metrics.render()[0].decode()
    return sum(
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )
