"""vLLM's names for metrics that this process has, for dashboards and rules made for vLLM.

Values are those of Millrace's own metrics at the moment of the scrape. Histograms keep Millrace's
buckets; labels are vLLM's `model_name` and `engine`, which is always 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from prometheus_client.core import Metric
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


class VllmNames(Collector):
    """Exposes the aliases of a registry's metrics. Register it with `add_vllm_names`."""

    def __init__(self, registry: Registry, model_name: str) -> None:
        """`model_name` is that of metrics without a label `model`."""
        self._registry = registry
        self._common = {"model_name": model_name, "engine": "0"}

    def describe(self) -> Iterable[Metric]:
        """Returns no name: which there are depends on the metrics at the scrape."""
        return ()

    def collect(self) -> Iterable[Metric]:
        for alias in ALIASES:
            families = [one for name in alias.of for one in self._registry.families(name)]
            if families:
                yield self._alias(alias, families)

    def _alias(self, alias: Alias, families: list[Metric]) -> Metric:
        name = alias.name.removesuffix("_total")  # of the family; its series have the suffix
        made = Metric(name, f"As {', '.join(alias.of)}.", families[0].type)
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for family in families:
            for sample in family.samples:
                suffix = sample.name.removeprefix(family.name)
                if suffix != "_created":
                    series = suffix, tuple(self._labels(alias, sample.labels).items())
                    sums[series] = sums.get(series, 0.0) + sample.value
        for (suffix, labels), value in sums.items():
            made.add_sample(name + suffix, dict(labels), value)
        return made

    def _labels(self, alias: Alias, labels: Mapping[str, str]) -> dict[str, str]:
        """Returns vLLM's labels of a series: of Millrace's only those that the alias keeps."""
        kept = {"model": "model_name", **alias.labels, "le": "le"}
        return self._common | {new: labels[own] for own, new in kept.items() if own in labels}


def add_vllm_names(registry: Registry, model_name: str = "") -> None:
    """Exposes the aliases of all metrics of `registry`, present and future."""
    registry.collectors.register(VllmNames(registry, model_name))
