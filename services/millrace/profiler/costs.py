"""Reads from its metrics the seconds and bytes that a live prefill instance has spent."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The seconds and bytes that a prefill instance has spent since its start.

    compute_s: of its compute thread, with waits. cpu_s: of the whole process on its cores.
    handshake_s: from the request to decode until its grant, summed over all requests.
    """

    cpu_s: float
    compute_s: float
    ring_wait_s: float
    history_wait_s: float
    handshake_s: float
    ring_bytes: float
    sent_bytes: float

    def __sub__(self, before: Costs) -> Costs:
        return Costs(
            **{name: getattr(self, name) - getattr(before, name) for name in self.__slots__}
        )


_METRICS: Mapping[str, str] = {
    "cpu_s": "process_cpu_seconds_total",
    "compute_s": "millrace_prefill_compute_seconds_sum",
    "ring_wait_s": "millrace_prefill_ring_wait_seconds_total",
    "history_wait_s": "millrace_prefill_history_wait_seconds_total",
    "handshake_s": "millrace_prefill_handshake_seconds_sum",
    "ring_bytes": "millrace_prefill_ring_bytes_total",
    "sent_bytes": "millrace_prefill_sent_bytes_total",
}


def read_costs(url: str) -> Costs:
    """Reads the costs of the instance whose metrics are at `url`. Blocks."""
    with urllib.request.urlopen(url, timeout=10) as response:
        text = response.read().decode()
    values = {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if not sample.labels
    }
    return Costs(**{field: values[metric] for field, metric in _METRICS.items()})
