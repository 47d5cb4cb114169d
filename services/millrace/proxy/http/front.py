"""What every HTTP request passes first: its sender is identified, and its answer gets headers.

Every route needs a key where keys are required, except the open routes: probes and metrics, which
Kubernetes and Prometheus read; the description of the API and the empty page of the board, which
say nothing of a deployment; and `/admin`, which has a guard of its own. A new route is protected
unless it is added here.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Collection
from typing import Any

from starlette.middleware.cors import CORSMiddleware

from millrace.proxy.errors import ApiError
from millrace.proxy.http.anthropic import REQUEST_ID as ANTHROPIC_REQUEST_ID
from millrace.proxy.http.anthropic import wants_anthropic
from millrace.proxy.http.asgi import Message, Receive, Scope, Send, header, send_error
from millrace.proxy.http.tenants import EXCHANGE, Tenants
from millrace.proxy.metrics import ProxyMetrics
from millrace.proxy.tenancy.exchange import Exchange

log = logging.getLogger("millrace.access")

_OPEN = frozenset(
    {
        *("/health", "/ready", "/metrics", "/board"),
        *("/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"),
    }
)
_ADMIN = "/admin/"

REQUEST_ID = b"x-request-id"
CLIENT_REQUEST_ID = b"x-client-request-id"
#: The longest id of a client's own that the log repeats, and the longest path.
_MOST_CHARACTERS = 512

#: Headers that scripts of other origins may read, beside those that every script may read.
_EXPOSED = (
    "x-request-id",
    "request-id",
    "retry-after",
    "retry-after-ms",
    *(
        f"x-ratelimit-{what}-{kind}"
        for what in ("limit", "remaining", "reset")
        for kind in ("requests", "tokens")
    ),
)
#: How long a browser may keep the answer to its question whether a request is allowed.
_CORS_AGE_S = 600

Asgi = Callable[[Scope, Receive, Send], Awaitable[None]]


def with_cors(app: Asgi, origins: str) -> Asgi:
    """Returns `app` behind the rules for web pages of `origins`; empty: no page of another origin.

    Browsers send no cookies or passwords of theirs: keys are bearer tokens, which pages set.
    """
    allowed = [origin.strip() for origin in origins.split(",") if origin.strip()]
    if not allowed:
        return app
    return CORSMiddleware(
        app,
        allow_origins=allowed,
        allow_methods=["GET", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=_EXPOSED,
        max_age=_CORS_AGE_S,
    )


class Front:
    """Wraps the application. `routes` are the paths that metrics may name."""

    def __init__(
        self,
        app: Asgi,
        tenants: Tenants,
        metrics: ProxyMetrics,
        routes: Collection[str],
        *,
        logs: bool,
    ) -> None:
        """`logs`: every request, except of open routes, gets a record in the access log."""
        self._app = app
        self._tenants = tenants
        self._answered = metrics.answered
        self._routes = routes
        self._logs = logs

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers an HTTP request."""
        exchange = Exchange(
            caller=self._tenants.keys.anonymous,
            arrived_at=time.monotonic(),
        )
        scope[EXCHANGE] = exchange
        try:
            await self._answer(exchange, scope, receive, _with_headers(exchange, scope, send))
        finally:
            if self._logs and scope["path"] not in _OPEN:
                log.info("request", extra=_record(exchange, scope))

    async def _answer(self, exchange: Exchange, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path not in _OPEN and not path.startswith(_ADMIN):
            try:
                exchange.caller = await self._tenants.identify(scope)
            except ApiError as error:
                route = path if path in self._routes else "other"
                self._answered(route, error.status)
                await send_error(scope, receive, send, error)
                return
        await self._app(scope, receive, send)


def _with_headers(exchange: Exchange, scope: Scope, send: Send) -> Send:
    """Returns `send` that adds the exchange's headers to the answer."""

    def sent(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            exchange.status, exchange.answered_at = message["status"], time.monotonic()
            headers = [*message.get("headers", ()), *exchange.headers]
            given = next((value for name, value in headers if name == REQUEST_ID), None)
            if given is None:
                given = b"req_" + uuid.uuid4().hex.encode()
                headers.append((REQUEST_ID, given))
            if wants_anthropic(scope):
                headers.append((ANTHROPIC_REQUEST_ID, given))
            exchange.request_id = given.decode("latin-1")
            message = {**message, "headers": headers}
        return send(message)

    return sent


def _record(exchange: Exchange, scope: Scope) -> dict[str, Any]:
    """Returns the fields of the access log: none has text of a prompt, an answer or a key."""
    arrived_at, answered_at = exchange.arrived_at, exchange.answered_at
    first_byte_s = None if answered_at is None else round(answered_at - arrived_at, 6)
    return {
        "request_id": exchange.request_id,
        **({"trace_id": exchange.trace_id} if exchange.trace_id else {}),
        "client_request_id": (header(scope, CLIENT_REQUEST_ID) or "")[:_MOST_CHARACTERS],
        "tenant": exchange.caller.tenant,
        "key": exchange.caller.key,
        "model": exchange.model,
        "method": scope["method"],
        "path": scope["raw_path"].decode("latin-1")[:_MOST_CHARACTERS],
        "status": exchange.status,
        "first_byte_s": first_byte_s,
        "duration_s": round(time.monotonic() - arrived_at, 6),
        "prompt_tokens": exchange.prompt_tokens,
        "generated_tokens": exchange.generated_tokens,
    }
