"""Holds the metrics of a process.

Names are `millrace_<area>_<what>_<unit>`; a counter's ends in `_total` after its unit.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

#: The last part of a name (before a counter's `_total`): base units and counted things.
UNITS = frozenset(
    {
        *("seconds", "bytes", "tokens", "ratio", "info"),
        *("requests", "chunks", "steps", "sequences", "pages", "tasks", "messages"),
        *("instances", "connections", "transfers", "errors", "retries", "changes"),
        *("rounds", "commands", "shards", "batches", "openings"),
    }
)
_NAME = re.compile(r"millrace(_[a-z][a-z0-9]*){2,}_(?P<unit>[a-z]+)")

#: In seconds, from a decode step on the fastest GPU to a prefill of a million tokens.
SECONDS_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
)

C = TypeVar("C", bound=Collector)

#: By the label's value, then by name.
Sample = Callable[[], Mapping[str, Mapping[str, float | None]]]


class Registry:
    """All metrics of one process; the process's own (CPU, memory, files) come with it."""

    def __init__(self) -> None:
        self.collectors = CollectorRegistry()
        self._made: dict[str, Collector] = {}
        ProcessCollector(registry=self.collectors)

    def counter(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
        """Makes a counter; `name` ends in `_total`. Raises ValueError for a malformed or used
        name.
        """
        if not name.endswith("_total"):
            raise ValueError(f"counter {name!r} must end in _total")
        _check(name.removesuffix("_total"))
        return self._add(name, Counter(name, documentation, labels, registry=None))

    def counter_function(self, name: str, documentation: str, value: Callable[[], float]) -> None:
        """Makes a counter that calls `value` at every read. Raises ValueError as `counter` does."""
        if not name.endswith("_total"):
            raise ValueError(f"counter {name!r} must end in _total")
        _check(name.removesuffix("_total"))
        self._add(name, _Counted(name, documentation, value))

    def gauge(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Gauge:
        """Makes a gauge. Raises ValueError for a malformed or used name."""
        _check(name)
        return self._add(name, Gauge(name, documentation, labels, registry=None))

    def gauge_function(self, name: str, documentation: str, value: Callable[[], float]) -> None:
        """Makes a gauge that calls `value` at every read. Raises ValueError as `gauge` does."""
        self.gauge(name, documentation).set_function(value)

    def gauges_by(self, label: str, documentation: Mapping[str, str], sample: Sample) -> None:
        """Makes gauges with one label, by name: each scrape calls `sample` once for all of them.

        Missing and None values are not exposed. Raises ValueError as `gauge` does.
        """
        for name in documentation:
            _check(name)
        sampled = _Sampled(label, documentation, sample)
        self.collectors.register(sampled)
        self._made.update(dict.fromkeys(documentation, sampled))

    def histogram(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float] = SECONDS_BUCKETS,
    ) -> Histogram:
        """Makes a histogram; `buckets` are upper bounds in the name's unit. Raises ValueError as
        `gauge` does.
        """
        _check(name)
        made = Histogram(name, documentation, labels, buckets=buckets, registry=None)
        return self._add(name, made)

    def _add(self, name: str, made: C) -> C:
        self.collectors.register(made)
        self._made[name] = made
        return made

    def families(self, name: str) -> Iterable[Metric]:
        """Returns the present values of a metric; none if the process does not have it."""
        made = self._made.get(name)
        families = () if made is None else made.collect()
        return [one for one in families if one.name in (name, name.removesuffix("_total"))]

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Returns the exposition and its content type, in the format that an Accept header
        prefers.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self.collectors), content_type


class _Counted(Collector):
    def __init__(self, name: str, documentation: str, value: Callable[[], float]) -> None:
        self._name = name
        self._documentation = documentation
        self._value = value

    def describe(self) -> Iterable[CounterMetricFamily]:
        """Returns the name, without a call of `value`."""
        return [CounterMetricFamily(self._name, self._documentation)]

    def collect(self) -> Iterable[CounterMetricFamily]:
        return [CounterMetricFamily(self._name, self._documentation, self._value())]


class _Sampled(Collector):
    def __init__(self, label: str, documentation: Mapping[str, str], sample: Sample) -> None:
        self._label = label
        self._documentation = documentation
        self._sample = sample

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Returns the names, without a call of `sample`."""
        return self._families().values()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        families = self._families()
        for value, gauges in self._sample().items():
            for name, measured in gauges.items():
                if measured is not None:
                    families[name].add_metric([value], measured)
        return families.values()

    def _families(self) -> dict[str, GaugeMetricFamily]:
        return {
            name: GaugeMetricFamily(name, documentation, labels=[self._label])
            for name, documentation in self._documentation.items()
        }


def _check(name: str) -> None:
    match = _NAME.fullmatch(name)
    if match is None or match["unit"] not in UNITS:
        raise ValueError(
            f"metric {name!r} must read millrace_<area>_<what>_<unit>, with a unit of "
            f"{', '.join(sorted(UNITS))}"
        )
