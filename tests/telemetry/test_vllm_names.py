"""Metrics under vLLM's names have the values of Millrace's own at the scrape."""

from __future__ import annotations

from millrace.telemetry.metrics import Registry
from millrace.telemetry.vllm_names import add_vllm_names
from support.metrics import total

MODEL = {"model_name": "tiny", "engine": "0"}


def test_aliases_follow_their_metrics() -> None:
    registry = Registry()
    add_vllm_names(registry, "tiny")
    ttft = registry.histogram("millrace_proxy_ttft_seconds", "d", ["slo_class"], buckets=(0.1, 1.0))
    finished = registry.counter("millrace_proxy_finished_requests_total", "d", ["reason"])
    registry.gauge_function("millrace_kv_used_ratio", "d", lambda: 0.25)
    for slo_class, seconds in (("a", 0.05), ("b", 0.5), ("b", 5.0)):
        ttft.labels(slo_class).observe(seconds)
    finished.labels("stop").inc(2)
    name = "vllm:time_to_first_token_seconds"
    for bound, count in (("0.1", 1), ("1.0", 2), ("+Inf", 3)):
        assert total(registry, f"{name}_bucket", le=bound, **MODEL) == count
    assert total(registry, f"{name}_count", **MODEL) == 3
    assert total(registry, f"{name}_sum", **MODEL) == 5.55
    assert total(registry, "vllm:request_success_total", finished_reason="stop", **MODEL) == 2
    assert total(registry, "vllm:kv_cache_usage_perc", **MODEL) == 0.25
    ttft.labels("a").observe(0.05)
    assert total(registry, f"{name}_bucket", le="0.1", **MODEL) == 2


def test_a_process_has_only_the_aliases_of_its_own_metrics() -> None:
    registry = Registry()
    add_vllm_names(registry, "tiny")
    registry.gauge_function("millrace_kv_used_ratio", "d", lambda: 0.5)
    text = registry.render()[0].decode()
    assert {line.split("{")[0] for line in text.splitlines() if line.startswith("vllm:")} == {
        "vllm:kv_cache_usage_perc"
    }
