"""The HTTP application: FastAPI, with the routes that take bodies as raw ASGI inside it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from millrace.proxy import openapi
from millrace.proxy.errors import ApiError
from millrace.proxy.generate import GenerateEndpoint, Services
from millrace.proxy.http import Disconnected, Receive, Scope, Send, read_json, send_error, send_json
from millrace.proxy.validation import Conversation

VERSION = "0.1.0"

Json = dict[str, Any]
#: Renders the metrics of all workers for an Accept header: the exposition and its content type.
RenderMetrics = Callable[[str], Awaitable[tuple[bytes, str]]]


class GatewayApp(FastAPI):
    """FastAPI whose document describes the raw routes too."""

    def __init__(self, services: Services) -> None:
        super().__init__(title="Millrace gateway", version=VERSION)
        self._bodies = services.bodies

    def openapi(self) -> Json:
        if not self.openapi_schema:
            self.openapi_schema = openapi.document(self._bodies, self.title, self.version)
        return self.openapi_schema


class JsonEndpoint:
    """A raw ASGI application: a JSON body in, a JSON document out."""

    def __init__(
        self, services: Services, route: str, handle: Callable[[Any], Awaitable[Json]]
    ) -> None:
        self._services = services
        self._route = route
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 499
        try:
            body = await read_json(scope, receive, self._services.config.proxy.max_body_bytes)
            document = await self._handle(body)
            status = 200
            await send_json(send, 200, orjson.dumps(document))
        except Disconnected:
            return
        except ApiError as error:
            status = error.status
            await send_error(send, receive, error)
        finally:
            self._services.metrics.requests.labels(self._route, status).inc()


class TokenEndpoints:
    """/tokenize and /detokenize."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def tokenize(self, body: object) -> Json:
        services = self._services
        request = services.bodies.read_tokenize(body)
        if isinstance(request, Conversation):
            prompt = await services.prompts.read_chat(request)
        else:
            [prompt] = await services.prompts.read_completion(request)
        ids = prompt.ids.tolist()
        return {
            "count": len(ids),
            "max_model_len": services.limits.context_tokens,
            "tokens": ids,
        }

    async def detokenize(self, body: object) -> Json:
        ids, skip = self._services.bodies.read_detokenize(body)
        return {"prompt": self._services.tokenizer.decode(ids, skip_special_tokens=skip)}


def create_app(services: Services, created: int, render_metrics: RenderMetrics) -> FastAPI:
    """`created`: Unix time shown as the model's."""
    app = GatewayApp(services)
    tokens = TokenEndpoints(services)
    raw: dict[str, GenerateEndpoint | JsonEndpoint] = {
        "/v1/chat/completions": GenerateEndpoint(services, chat=True),
        "/v1/completions": GenerateEndpoint(services, chat=False),
        "/tokenize": JsonEndpoint(services, "/tokenize", tokens.tokenize),
        "/detokenize": JsonEndpoint(services, "/detokenize", tokens.detokenize),
    }
    # First in the list: the hot routes match before anything else is tried.
    app.router.routes[:0] = [Route(path, end, methods=["POST"]) for path, end in raw.items()]
    _add_models(app, services, created)
    _add_probes(app, services, render_metrics)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)
    return app


def _add_models(app: FastAPI, services: Services, created: int) -> None:
    model = {
        "id": services.limits.model,
        "object": "model",
        "created": created,
        "owned_by": "millrace",
        "max_model_len": services.limits.context_tokens,
    }

    @app.get("/v1/models")
    async def list_models() -> Response:
        return _json({"object": "list", "data": [model]})

    @app.get("/v1/models/{name:path}")
    async def show_model(name: str) -> Response:
        try:
            services.bodies.check_model(name)
        except ApiError as error:
            return Response(error.body(), error.status, media_type="application/json")
        return _json(model)


def _add_probes(app: FastAPI, services: Services, render_metrics: RenderMetrics) -> None:
    @app.get("/health")
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.get("/ready")
    async def ready() -> Response:
        if services.gateway.ready:
            return _json({"status": "ready"})
        return _json({"status": "not ready"}, 503)

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        body, content_type = await render_metrics(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})


def _json(document: Json, status: int = 200) -> Response:
    return Response(orjson.dumps(document), status, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # it is registered for these
    if error.status_code == 404:
        found = ApiError(404, f"No route {request.method} {request.url.path}.", code="not_found")
    elif error.status_code == 405:
        found = ApiError(405, f"{request.method} is not allowed here.", code="method_not_allowed")
    else:
        found = ApiError(error.status_code, str(error.detail))
    return Response(
        found.body(), found.status, headers=error.headers, media_type="application/json"
    )


async def _internal_error(request: Request, error: Exception) -> Response:
    """The traceback goes to the log, not to the client."""
    return Response(ApiError(500, "Internal error.").body(), 500, media_type="application/json")
