"""The endpoint's behaviour on good and bad requests, and on clients that are slow or silent."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import httpx
import pytest

from millrace.core.errors import ConfigError
from millrace.listening import bound_socket
from millrace.telemetry import metrics_server
from millrace.telemetry.metrics import Registry
from millrace.telemetry.metrics_server import MetricsServer, serve_metrics
from support.deadlines import HANG_S

HEALTH = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
HALF = HEALTH[:-2]


@dataclass
class Service:
    """A service that serves its metrics."""

    registry: Registry = field(default_factory=Registry)
    ready: bool = False
    port: int = 0

    async def serve(self) -> MetricsServer:
        server = await serve_metrics(self.port, lambda: self.ready, registry=self.registry)
        self.port = server.port
        return server

    async def exchange(self, request: bytes) -> bytes:
        """Returns the answer; empty if the connection ends without an answer."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        try:
            writer.write(request)
            return await reader.read()
        except ConnectionResetError:
            return b""
        finally:
            writer.close()


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    service = Service()
    server = await service.serve()
    yield service
    await server.close()


async def test_on_every_address_it_takes_both_families(monkeypatch: pytest.MonkeyPatch) -> None:
    """asyncio gives a server of `::` no address of IPv4."""
    asked = []

    def bound(host: str, port: int) -> socket.socket:
        asked.append(host)
        return bound_socket("127.0.0.1", port)

    monkeypatch.setattr(metrics_server, "bound_socket", bound)
    server = await serve_metrics(0, lambda: True, registry=Registry(), host="::")
    found = Service(port=server.port)
    assert (await found.exchange(HEALTH)).startswith(b"HTTP/1.1 200 ")
    assert asked == ["::"]
    await server.close()


async def test_the_three_paths(service: Service) -> None:
    service.registry.gauge("millrace_decode_free_pages", "d").set(7)
    async with httpx.AsyncClient(
        base_url=f"http://127.0.0.1:{service.port}", timeout=HANG_S
    ) as client:
        assert (await client.get("/health")).text == "ok\n"
        unready = await client.get("/ready")
        assert (unready.status_code, unready.text) == (503, "not ready\n")
        service.ready = True
        assert (await client.get("/ready?verbose")).status_code == 200
        plain = await client.get("/metrics")
        assert "millrace_decode_free_pages 7.0" in plain.text.splitlines()
        assert plain.headers["content-type"].startswith("text/plain")
        assert plain.headers["connection"] == "close"
        assert "content-encoding" not in plain.headers
        fancy = await client.get("/metrics", headers={"Accept": "application/openmetrics-text"})
        assert fancy.headers["content-type"].startswith("application/openmetrics-text")
        assert fancy.text.endswith("# EOF\n")
        for path in ("/health", "/metrics"):
            head = await client.head(path)
            assert head.status_code == 200 and head.content == b""
        assert (await client.get("/secrets")).status_code == 404
        assert (await client.post("/metrics", content=b"x")).status_code == 405


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"GET /health HTTP/2\r\n\r\n",
        b"\xff\xfe\x00 \x01 HTTP/1.1\r\n\r\n",
        b"GET /" + b"x" * 100_000 + b" HTTP/1.1\r\n\r\n",
    ],
)
async def test_malformed_requests(service: Service, request_bytes: bytes) -> None:
    assert (await service.exchange(request_bytes)).startswith(b"HTTP/1.1 400 ")


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        HALF,
        b"GET /metrics HTTP/1.1\r\nHost: h\r\nContent-Length: 5\r\n\r\n",  # without its body
        b"GET /metrics HTTP/1.1\r\nHost: h\r\n\r\n",  # an answer that is not read
    ],
)
async def test_a_silent_or_slow_client_is_dropped(
    service: Service, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.registry.gauge("millrace_x_y_seconds", "d" * (32 << 20))  # more than sockets hold
    monkeypatch.setattr(metrics_server, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(metrics_server, "REQUEST_TIMEOUT_S", 0.1)
    _, writer = await asyncio.open_connection("127.0.0.1", service.port, limit=1)
    writer.write(sent)
    await writer.drain()
    async with asyncio.timeout(HANG_S):
        while b"ok\n" not in await service.exchange(HEALTH):
            pass
    writer.close()


async def test_connections_are_bounded(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_server, "MAX_CONNECTIONS", 2)
    waiting = [await asyncio.open_connection("127.0.0.1", service.port) for _ in range(2)]
    for _, writer in waiting:
        writer.write(HALF)
        await writer.drain()
    assert await service.exchange(HEALTH) == b""
    reader, writer = waiting[0]
    writer.write(b"\r\n")
    assert b"ok\n" in await reader.read()
    for _, writer in waiting:
        writer.close()


async def test_close_drops_open_connections_and_frees_the_port() -> None:
    service = Service()
    server = await service.serve()
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(HALF)
    await writer.drain()
    async with asyncio.timeout(HANG_S):
        await server.close()
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()
    again = await service.serve()
    assert b"ok\n" in await service.exchange(HEALTH)
    await again.close()


async def test_a_taken_port_is_named(service: Service) -> None:
    with pytest.raises(ConfigError, match=f"can't listen on 127.0.0.1:{service.port}"):
        await serve_metrics(service.port, lambda: True, registry=Registry())
