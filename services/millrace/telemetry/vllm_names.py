"""vLLM's names for metrics that this process has, for dashboards and rules made for vLLM.

Values are those of Millrace's own metrics at the moment of the scrape. Histograms keep Millrace's
buckets; labels are vLLM's `model_name` and `engine`, which is always 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from millrace.telemetry.metrics import Registry


class Alias(NamedTuple):
    """A name of vLLM's, and the metrics whose sum it is; labels that it keeps are renamed."""

    name: str
    of: tuple[str, ...]
    labels: Mapping[str, str] = {}


ALIASES: Final = (
    Alias("vllm:time_to_first_token_seconds", ("millrace_proxy_ttft_seconds",)),
    Alias("vllm:inter_token_latency_seconds", ("millrace_proxy_tbt_seconds",)),
    Alias("vllm:time_per_output_token_seconds", ("millrace_proxy_tbt_seconds",)),
    Alias("vllm:e2e_request_latency_seconds", ("millrace_proxy_e2e_seconds",)),
    Alias("vllm:prompt_tokens_total", ("millrace_proxy_prompt_tokens_total",)),
    Alias("vllm:generation_tokens_total", ("millrace_proxy_generated_tokens_total",)),
    Alias("vllm:prefix_cache_queries_total", ("millrace_proxy_prompt_tokens_total",)),
    Alias("vllm:prefix_cache_hits_total", ("millrace_proxy_cached_prompt_tokens_total",)),
    Alias(
        "vllm:request_success_total",
        ("millrace_proxy_finished_requests_total",),
        {"reason": "finished_reason"},
    ),
    Alias("vllm:num_requests_running", ("millrace_proxy_streaming_requests",)),
    Alias("vllm:num_requests_waiting", ("millrace_proxy_waiting_requests",)),
    Alias("vllm:num_preemptions_total", ("millrace_decode_preempted_requests_total",)),
    Alias("vllm:kv_cache_usage_perc", ("millrace_kv_used_ratio",)),
)

#: A series' labels, then for histograms the upper bound; counters and gauges have no bound.
_Sums = dict[tuple[tuple[str, ...], str], float]


class VllmNames(Collector):
    """Exposes the aliases of a registry's metrics. Register it with `add_vllm_names`."""

    def __init__(self, registry: Registry, model_name: str) -> None:
        self._registry = registry
        self._common = (model_name, "0")

    def describe(self) -> Iterable[Metric]:
        """Returns no name: which there are depends on the metrics at the scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        for alias in ALIASES:
            families = [one for name in alias.of for one in self._registry.families(name)]
            if families:
                yield self._alias(alias, families)

    def _alias(self, alias: Alias, families: list[Metric]) -> Metric:
        labels = ["model_name", "engine", *alias.labels.values()]
        buckets: _Sums = {}
        sums: _Sums = {}
        for family in families:
            for sample in family.samples:
                own = tuple(sample.labels.get(label, "") for label in alias.labels)
                into, bound = sums, ""
                if sample.name.endswith("_bucket"):
                    into, bound = buckets, sample.labels["le"]
                elif sample.name.endswith("_count") or sample.name.endswith("_created"):
                    continue  # the count is in the last bucket
                into[own, bound] = into.get((own, bound), 0.0) + sample.value
        made = _FAMILIES[families[0].type](alias.name, f"As {', '.join(alias.of)}.", labels)
        for (own, _), value in sums.items():
            values = [*self._common, *own]
            if isinstance(made, HistogramMetricFamily):
                bounds = [(le, n) for (of, le), n in buckets.items() if of == own]
                made.add_metric(values, buckets=bounds, sum_value=value)
            else:
                made.add_metric(values, value)
        return made


def _family(kind: type[Metric]) -> Callable[[str, str, list[str]], Metric]:
    return lambda name, said, labels: kind(name, said, labels=labels)  # type: ignore[call-arg]


_FAMILIES: Final = {
    "counter": _family(CounterMetricFamily),
    "gauge": _family(GaugeMetricFamily),
    "histogram": _family(HistogramMetricFamily),
}


def add_vllm_names(registry: Registry, model_name: str) -> None:
    """Exposes the aliases of all metrics of `registry`, present and future."""
    registry.collectors.register(VllmNames(registry, model_name))
