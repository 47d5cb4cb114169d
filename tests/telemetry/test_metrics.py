"""Names of metrics, and the exposition."""

from __future__ import annotations

import pytest
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families

from millrace.telemetry.metrics import Registry


def samples(exposition: str) -> dict[str, float]:
    return {
        sample.name + "".join(f",{k}={v}" for k, v in sample.labels.items()): sample.value
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
    }


def test_values_reach_the_exposition() -> None:
    registry = Registry()
    registry.counter("millrace_proxy_output_tokens_total", "d", ["model"]).labels("m").inc(3)
    registry.gauge("millrace_decode_free_pages", "d").set(7)
    registry.gauge_function("millrace_decode_used_pages", "d", lambda: 2.5)
    registry.histogram("millrace_proxy_ttft_seconds", "d", buckets=(0.1, 1.0)).observe(0.5)
    body, content_type = registry.render()
    found = samples(body.decode())
    assert content_type.startswith("text/plain")
    assert found["millrace_proxy_output_tokens_total,model=m"] == 3
    assert found["millrace_decode_free_pages"] == 7
    assert found["millrace_decode_used_pages"] == 2.5
    assert found["millrace_proxy_ttft_seconds_bucket,le=0.1"] == 0
    assert found["millrace_proxy_ttft_seconds_bucket,le=1.0"] == 1
    assert found["process_resident_memory_bytes"] > 1e6


@pytest.mark.parametrize(
    "name",
    [
        "proxy_ttft_seconds",
        "millrace_ttft_seconds",
        "millrace_proxy_ttft",
        "millrace_proxy_ttft_ms",
        "millrace_proxy_TTFT_seconds",
        "millrace_proxy__seconds",
        "millrace_proxy_ttft_seconds\n",
    ],
)
def test_names_out_of_form_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match="must read millrace_<area>_<what>_<unit>"):
        Registry().gauge(name, "d")
    with pytest.raises(ValueError, match="must read millrace_<area>_<what>_<unit>"):
        Registry().histogram(name, "d")


def test_counters_end_in_total() -> None:
    with pytest.raises(ValueError, match="must end in _total"):
        Registry().counter("millrace_proxy_done_requests", "d")
    with pytest.raises(ValueError, match="must read"):
        Registry().counter("millrace_proxy_done_total", "d")


def test_a_name_is_taken_once() -> None:
    registry = Registry()
    registry.gauge("millrace_decode_free_pages", "d")
    with pytest.raises(ValueError, match="millrace_decode_free_pages"):
        registry.gauge("millrace_decode_free_pages", "d")


def test_gauges_of_one_look_leave_out_what_was_not_measured() -> None:
    registry = Registry()
    looks = 0

    def look() -> dict[str, dict[str, float | None]]:
        nonlocal looks
        looks += 1
        return {"a": {"millrace_x_y_seconds": 1.5, "millrace_x_z_ratio": None}, "b": {}}

    names = {"millrace_x_y_seconds": "d", "millrace_x_z_ratio": "e"}
    registry.gauges_by("pool", names, look)
    assert looks == 0
    text = registry.render()[0].decode()
    assert looks == 1
    assert samples(text).items() >= {"millrace_x_y_seconds,pool=a": 1.5}.items()
    assert "millrace_x_z_ratio{" not in text and 'pool="b"' not in text
    with pytest.raises(ValueError, match="millrace_x_y_seconds"):
        registry.gauge("millrace_x_y_seconds", "taken")
    with pytest.raises(ValueError, match="must read"):
        registry.gauges_by("pool", {"millrace_seconds": "d"}, look)


def test_a_counter_may_be_a_function() -> None:
    registry = Registry()
    registry.counter_function("millrace_scheduler_ignored_messages_total", "d", lambda: 5)
    body, _ = registry.render()
    assert samples(body.decode())["millrace_scheduler_ignored_messages_total"] == 5
    assert b"# TYPE millrace_scheduler_ignored_messages_total counter" in body
    with pytest.raises(ValueError, match="must end in _total"):
        registry.counter_function("millrace_scheduler_ignored_messages", "d", lambda: 5)


def test_openmetrics_has_the_trace_of_an_observation() -> None:
    registry = Registry()
    seconds = registry.histogram("millrace_proxy_ttft_seconds", "d", buckets=(0.1, 1.0))
    seconds.observe(0.5, {"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736"})
    body, content_type = registry.render("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    exemplars = [
        (sample.labels["le"], sample.exemplar.labels["trace_id"], sample.exemplar.value)
        for family in openmetrics.text_string_to_metric_families(body.decode())
        for sample in family.samples
        if sample.exemplar is not None
    ]
    assert exemplars == [("1.0", "4bf92f3577b34da6a3ce929d0e0e4736", 0.5)]
