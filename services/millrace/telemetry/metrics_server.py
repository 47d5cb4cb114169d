"""Serves /metrics, /ready and /health of services without an HTTP server of their own.

prometheus_client renders on the event loop, between changes of the state that gauges sample, and
uvicorn's protocol speaks HTTP. uvicorn has no time limit for a request that never completes and
none on the number of connections; `_Connection` adds both.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from functools import partial
from http import HTTPStatus
from typing import Any

from prometheus_client import make_asgi_app
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from millrace.core.errors import ConfigError, reason_of
from millrace.listening import EVERYWHERE, bound_socket
from millrace.telemetry.metrics import Registry

MAX_REQUEST_BYTES = 16 << 10  # of the request line and headers
MAX_CONNECTIONS = 64
REQUEST_TIMEOUT_S = 5.0  # from the connection to the last byte of the answer

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


class _Connection(H11Protocol):
    """A connection that ends after `REQUEST_TIMEOUT_S` at the latest, whatever its client does."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._deadline = self.loop.call_later(REQUEST_TIMEOUT_S, transport.abort)
        if len(self.connections) > MAX_CONNECTIONS:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._deadline.cancel()
        super().connection_lost(exc)


class MetricsServer:
    """Answers GET and HEAD, one request per connection. Made by `serve_metrics`."""

    def __init__(self, server: asyncio.Server, state: ServerState) -> None:
        self._server = server
        self._state = state
        self.port: int = server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stops listening and drops open connections."""
        self._server.close()
        for connection in list(self._state.connections):
            connection.transport.abort()
        await asyncio.gather(*self._state.tasks)
        await self._server.wait_closed()


async def serve_metrics(
    port: int, ready: Callable[[], bool], *, registry: Registry, host: str = "127.0.0.1"
) -> MetricsServer:
    """Serves /metrics, /ready (503 while `ready()` is false) and /health; port 0: any free port.

    Raises ConfigError when it can't listen. Close the returned server.
    """
    metrics = make_asgi_app(registry.collectors, disable_compression=True)

    async def app(scope: _Message, receive: _Receive, send: _Send) -> None:
        match scope["method"], scope["path"]:
            case "GET" | "HEAD", "/metrics":
                await metrics(scope, receive, send)
            case "GET" | "HEAD", "/health":
                await _answer(send, HTTPStatus.OK, "ok")
            case "GET" | "HEAD", "/ready" if ready():
                await _answer(send, HTTPStatus.OK, "ready")
            case "GET" | "HEAD", "/ready":
                await _answer(send, HTTPStatus.SERVICE_UNAVAILABLE, "not ready")
            case "GET" | "HEAD", _:
                await _answer(send, HTTPStatus.NOT_FOUND, "Not Found")
            case _:
                await _answer(send, HTTPStatus.METHOD_NOT_ALLOWED, "Method Not Allowed")

    config = Config(
        app,
        http=_Connection,
        interface="asgi3",
        ws="none",
        lifespan="off",
        access_log=False,
        log_config=None,
        log_level="error",  # malformed requests are not logged
        proxy_headers=False,
        h11_max_incomplete_event_size=MAX_REQUEST_BYTES,
    )
    state = ServerState()
    state.default_headers = [(b"connection", b"close")]
    loop, connection = asyncio.get_running_loop(), partial(_Connection, config, state, {})
    try:
        if host == EVERYWHERE:  # asyncio's own socket would have no address of IPv4
            server = await loop.create_server(connection, sock=bound_socket(host, port))
        else:
            server = await loop.create_server(connection, host, port)
    except OSError as error:
        raise ConfigError(
            f"can't listen on {host}:{port} for metrics: {reason_of(error)}"
        ) from error
    return MetricsServer(server, state)


async def _answer(send: _Send, status: HTTPStatus, text: str) -> None:
    headers = [(b"content-type", b"text/plain; charset=utf-8")]
    await send({"type": "http.response.start", "status": status.value, "headers": headers})
    await send({"type": "http.response.body", "body": f"{text}\n".encode()})
