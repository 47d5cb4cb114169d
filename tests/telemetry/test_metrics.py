"""Names, the exposition, and the endpoint's behaviour on good and bad requests."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from millrace.core.errors import MillraceError
from millrace.telemetry import metrics
from millrace.telemetry.metrics import MetricsServer, Registry, serve_metrics
from support.deadlines import HANG_S


class Readiness:
    ready = False


@pytest.fixture
async def endpoint() -> AsyncIterator[tuple[MetricsServer, Registry, Readiness]]:
    registry, state = Registry(), Readiness()
    server = await serve_metrics(0, lambda: state.ready, registry=registry)
    yield server, registry, state
    await server.close()


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


async def test_the_three_paths(endpoint: tuple[MetricsServer, Registry, Readiness]) -> None:
    server, registry, state = endpoint
    registry.gauge("millrace_decode_free_pages", "d").set(7)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.port}") as client:
        assert (await client.get("/health")).text == "ok\n"
        assert (await client.get("/ready")).status_code == 503
        state.ready = True
        assert (await client.get("/ready?verbose")).status_code == 200
        plain = await client.get("/metrics")
        assert samples(plain.text)["millrace_decode_free_pages"] == 7
        fancy = await client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
        assert fancy.headers["content-type"].startswith("application/openmetrics-text")
        assert fancy.text.endswith("# EOF\n")
        head = await client.head("/health")
        assert head.status_code == 200 and head.content == b""
        assert (await client.get("/secrets")).status_code == 404
        assert (await client.post("/metrics", content=b"x")).status_code == 405


async def exchange(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    try:
        return await reader.read()
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("request_bytes", "status"),
    [
        (b"\r\n\r\n", b"400"),
        (b"GET /health\r\n\r\n", b"400"),
        (b"GET /health HTTP/2\r\n\r\n", b"400"),
        (b"\xff\xfe\x00 \x01 HTTP/1.1\r\n\r\n", b"405"),
        (b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n", b"431"),
    ],
)
async def test_malformed_requests(
    endpoint: tuple[MetricsServer, Registry, Readiness], request_bytes: bytes, status: bytes
) -> None:
    server, _, _ = endpoint
    answer = await exchange(server.port, request_bytes)
    assert answer.startswith(b"HTTP/1.1 " + status + b" ")


async def test_a_silent_client_is_dropped(
    endpoint: tuple[MetricsServer, Registry, Readiness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "REQUEST_TIMEOUT_S", 0.1)
    server, _, _ = endpoint
    async with asyncio.timeout(HANG_S):
        assert await exchange(server.port, b"GET /health HTTP/1.1\r\n") == b""


async def test_connections_are_bounded(
    endpoint: tuple[MetricsServer, Registry, Readiness], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics, "MAX_CONNECTIONS", 2)
    server, _, _ = endpoint
    waiting = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(2)]
    for _, writer in waiting:
        writer.write(b"GET /health HTTP/1.1\r\n")
        await writer.drain()
    with contextlib.suppress(ConnectionResetError):
        assert await exchange(server.port, b"GET /health HTTP/1.1\r\n\r\n") == b""
    reader, writer = waiting[0]
    writer.write(b"\r\n")
    assert (await reader.read()).endswith(b"ok\n")
    for _, writer in waiting:
        writer.close()


async def test_close_drops_open_connections() -> None:
    server = await serve_metrics(0, lambda: True, registry=Registry())
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(b"GET")
    await writer.drain()
    async with asyncio.timeout(HANG_S):
        await server.close()
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()
    with pytest.raises(OSError):
        await asyncio.open_connection("127.0.0.1", server.port)


async def test_a_taken_port_is_named(
    endpoint: tuple[MetricsServer, Registry, Readiness],
) -> None:
    server, _, _ = endpoint
    with pytest.raises(MillraceError, match=f"127.0.0.1:{server.port}"):
        await serve_metrics(server.port, lambda: True, registry=Registry())


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
