"""Log records and metrics as a collector has them."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from millrace.core.config import TelemetryConfig
from millrace.core.errors import ConfigError
from millrace.telemetry.log import setup_logging
from millrace.telemetry.metrics import Registry
from millrace.telemetry.otlp.exports import Exports
from support.deadlines import eventually
from support.otlp_receiver import Receiver, otlp_receiver

TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
log = logging.getLogger("millrace.decode.loop")


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    async with otlp_receiver() as found:
        yield found


@pytest.fixture(autouse=True)
def root_logger() -> Iterator[logging.Logger]:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield root
    root.handlers[:] = before
    root.setLevel(level)


@asynccontextmanager
async def exporting(endpoint: str, registry: Registry, **settings: Any) -> AsyncIterator[None]:
    config = TelemetryConfig(otlp_endpoint=endpoint, **settings)
    exports = Exports(config, "decode", "decode-0", registry)
    exports.start()
    try:
        yield
    finally:
        await exports.close()


# ---- log records


async def test_a_log_record_has_its_request_its_trace_and_its_exception(receiver: Receiver) -> None:
    setup_logging(TelemetryConfig(), "decode-0")
    async with exporting(receiver.endpoint, Registry(), otlp_logs="on"):
        about = {"request_id": "r1", "tokens": 3, "share": 0.5, "ends": True, "pages": [1, 2]}
        log.warning("request %s failed", "r1", extra={**about, "trace_id": TRACE_ID})
        log.debug("unseen")
        try:
            _ = 1 / 0
        except ZeroDivisionError:
            log.exception("100% wrong")
    log.warning("after the end")
    warned, wrong = receiver.logs
    assert (warned.service, warned.instance) == ("decode", "decode-0")
    assert (warned.logger, warned.trace_id) == ("millrace.decode.loop", TRACE_ID)
    assert (warned.severity, warned.severity_text) == (13, "WARN")
    assert warned.body == "request r1 failed"
    assert warned.attributes == {**about, "pages": "[1, 2]"}
    assert 0 < warned.time_ns <= wrong.time_ns
    assert (wrong.severity, wrong.severity_text, wrong.trace_id) == (17, "ERROR", "")
    assert wrong.attributes["exception.type"] == "ZeroDivisionError"
    assert wrong.attributes["exception.message"] == "division by zero"
    assert "test_exports.py" in wrong.attributes["exception.stacktrace"]


async def test_the_lines_on_stderr_stay_as_they_are(
    receiver: Receiver, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(TelemetryConfig(log_format="json"), "decode-0")
    async with exporting(receiver.endpoint, Registry(), otlp_logs="on"):
        log.info("served", extra={"trace_id": TRACE_ID})
    line = json.loads(capsys.readouterr().err)
    assert (line["message"], line["trace_id"]) == ("served", TRACE_ID)
    assert [one.body for one in receiver.logs] == ["served"]


async def test_what_the_exporter_logs_of_itself_is_not_exported(receiver: Receiver) -> None:
    setup_logging(TelemetryConfig(), "decode-0")
    async with exporting(receiver.endpoint, Registry(), otlp_logs="on"):
        logging.getLogger("opentelemetry.exporter").warning("the collector is away")
        log.info("served")
    assert [one.body for one in receiver.logs] == ["served"]


# ---- metrics


async def test_metrics_are_those_of_the_registry(receiver: Receiver) -> None:
    registry = Registry()
    requests = registry.counter(
        "millrace_test_asked_requests_total", "Requests.", ["route", "code"]
    )
    requests.labels("/v1/models", "200").inc(3)
    requests.labels("/v1/models", "404").inc()
    registry.gauge("millrace_test_free_pages", "Pages.").set(7)
    registry.counter_function("millrace_test_made_tokens_total", "Tokens.", lambda: 12.0)
    waits = registry.histogram(
        "millrace_test_queue_wait_seconds", "Waits.", ["class"], buckets=(0.1, 1.0)
    )
    for seconds in (0.05, 0.5, 0.75, 30.0):
        waits.labels("chat").observe(seconds)
    waits.labels("file").observe(0.01)
    registry.histogram("millrace_test_queue_empty_seconds", "Nothing yet.", ["class"])
    async with exporting(receiver.endpoint, registry, otlp_metrics_s=3600.0):
        pass
    (counter,) = receiver.metric("millrace_test_asked_requests_total")
    assert (counter.service, counter.instance) == ("decode", "decode-0")
    assert counter.message.description == "Requests."
    assert counter.message.sum.is_monotonic
    assert counter.message.sum.aggregation_temporality == 2  # cumulative
    values = {labels: point.as_double for labels, point in counter.points.items()}
    assert values == {("/v1/models", "200"): 3, ("/v1/models", "404"): 1}
    point = counter.points["/v1/models", "200"]
    assert 0 < point.start_time_unix_nano <= point.time_unix_nano
    (gauge,) = receiver.metric("millrace_test_free_pages")
    assert gauge.message.gauge.data_points[0].as_double == 7
    (made,) = receiver.metric("millrace_test_made_tokens_total")
    assert made.message.sum.data_points[0].as_double == 12
    (histogram,) = receiver.metric("millrace_test_queue_wait_seconds")
    chat, file = histogram.points["chat",], histogram.points["file",]
    assert (chat.count, chat.sum) == (4, 31.3)
    assert list(chat.explicit_bounds) == [0.1, 1.0]
    assert list(chat.bucket_counts) == [1, 2, 1]
    assert not chat.HasField("min") and not chat.HasField("max")
    assert (file.count, list(file.bucket_counts)) == (1, [1, 0, 0])
    assert not receiver.metric("millrace_test_queue_empty_seconds")
    assert receiver.metric("process_cpu_seconds_total")
    assert not receiver.logs


async def test_metrics_are_exported_again_and_again_and_at_the_end(receiver: Receiver) -> None:
    registry = Registry()
    tokens = registry.counter("millrace_test_made_tokens_total", "Tokens.")

    def values() -> list[float]:
        found = receiver.metric("millrace_test_made_tokens_total")
        return [one.message.sum.data_points[0].as_double for one in found]

    async with exporting(receiver.endpoint, registry, otlp_metrics_s=0.01):
        tokens.inc()
        await eventually(lambda: 1 in values())
        tokens.inc()
        await eventually(lambda: 2 in values())
        tokens.inc()
    assert values()[-1] == 3
    assert values() == sorted(values())


async def test_values_are_read_on_the_event_loop(receiver: Receiver) -> None:
    registry = Registry()
    seen = set()

    def free() -> float:
        seen.add(asyncio.get_running_loop())  # raises on another thread
        return 1.0

    registry.gauge_function("millrace_test_free_pages", "Pages.", free)
    async with exporting(receiver.endpoint, registry, otlp_metrics_s=3600.0):
        pass
    assert seen == {asyncio.get_running_loop()}


async def test_a_collector_that_is_away_stops_nothing(caplog: pytest.LogCaptureFixture) -> None:
    settings = {"otlp_logs": "on", "otlp_metrics_s": 0.01}
    async with exporting("127.0.0.1:1", Registry(), **settings):
        log.warning("served")
        await eventually(lambda: "served" in caplog.text)


# ---- settings


@pytest.mark.parametrize(
    ("name", "value", "said"), [("otlp_logs", "on", "'on'"), ("otlp_metrics_s", 15.0, "15.0")]
)
def test_a_collector_must_be_named(name: str, value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=f"^telemetry.{name} is {said} and .*otlp_endpoint ''"):
        TelemetryConfig(**{name: value})  # type: ignore[arg-type]
