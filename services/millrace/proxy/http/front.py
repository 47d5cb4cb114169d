"""What every HTTP request passes first: its sender is identified, and its answer gets headers.

Every route needs a key where keys are required, except the open routes: probes and metrics, which
Kubernetes and Prometheus read; the description of the API, which says nothing of a deployment; and
`/admin`, which has a guard of its own. A new route is protected unless it is added here.
"""

from __future__ import annotations

import uuid
from collections.abc import Awaitable, Callable, Collection

from millrace.proxy.errors import ApiError
from millrace.proxy.http.asgi import Message, Receive, Scope, Send, send_error
from millrace.proxy.http.tenants import EXCHANGE, Tenants
from millrace.proxy.metrics import ProxyMetrics
from millrace.proxy.tenancy.exchange import Exchange

_OPEN = frozenset(
    {"/health", "/ready", "/metrics", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"}
)
_ADMIN = "/admin/"

REQUEST_ID = b"x-request-id"

Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]


class Front:
    """Wraps the application. `routes` are the paths that metrics may name."""

    def __init__(
        self, app: Asgi, tenants: Tenants, metrics: ProxyMetrics, routes: Collection[str]
    ) -> None:
        self._app = app
        self._tenants = tenants
        self._requests = metrics.requests
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers an HTTP request."""
        exchange = Exchange(
            caller=self._tenants.keys.anonymous, request_id=f"req_{uuid.uuid4().hex}"
        )
        scope[EXCHANGE] = exchange
        send = _with_headers(exchange, send)
        path: str = scope["path"]
        if path not in _OPEN and not path.startswith(_ADMIN):
            try:
                exchange.caller = await self._tenants.identify(scope)
            except ApiError as error:
                route = path if path in self._routes else "other"
                self._requests.labels(route, error.status).inc()
                await send_error(send, receive, error)
                return
        await self._app(scope, receive, send)


def _with_headers(exchange: Exchange, send: Send) -> Send:
    """Returns `send` that adds the exchange's headers to the answer."""

    def sent(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            headers = [*message.get("headers", ()), *exchange.headers]
            given = next((value for name, value in headers if name == REQUEST_ID), None)
            if given is None:
                headers.append((REQUEST_ID, exchange.request_id.encode()))
            else:
                exchange.request_id = given.decode("latin-1")
            message = {**message, "headers": headers}
        return send(message)

    return sent
