"""The HTTP application: FastAPI, with raw ASGI for the routes that take bodies."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import orjson
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.routing import Route

from millrace.proxy.errors import ApiError
from millrace.proxy.http.admin import (
    METHODS,
    REQUEST_PATH,
    ROUTES,
    ModelsAdmin,
    RequestAdmin,
    SchedulerAdmin,
    TraceAdmin,
)
from millrace.proxy.http.admin import MODELS_PATH as ADMIN_MODELS_PATH
from millrace.proxy.http.admin import TRACE_PATH as ADMIN_TRACE_PATH
from millrace.proxy.http.anthropic import COUNT_PATH, MESSAGES_PATH, error_body, no_route
from millrace.proxy.http.asgi import (
    Disconnected,
    Receive,
    Scope,
    Send,
    receive_body,
    send_document,
    send_error,
)
from millrace.proxy.http.board import EVENTS_PATH, PAGE_PATH, BoardEvents, show_page
from millrace.proxy.http.description.document import document
from millrace.proxy.http.endpoints.batch_calls import BatchCalls
from millrace.proxy.http.endpoints.batches import BATCH_PATH, BATCHES_PATH, BatchEndpoints
from millrace.proxy.http.endpoints.conversations import (
    CONVERSATION_PATH,
    CONVERSATIONS_PATH,
    ITEM_PATH,
    ITEMS_PATH,
    ConversationEndpoints,
)
from millrace.proxy.http.endpoints.files import FILE_PATH, FILES_PATH, FileEndpoints
from millrace.proxy.http.endpoints.generate import GenerateEndpoint, Services
from millrace.proxy.http.endpoints.messages import CreateMessage, count_tokens
from millrace.proxy.http.endpoints.models import (
    MODEL_PATH,
    MODELS_PATH,
    TOKENIZER_PATH,
    ModelEndpoints,
)
from millrace.proxy.http.endpoints.pooled import PooledEndpoint
from millrace.proxy.http.endpoints.requests import (
    EXPLAIN_PATH,
    REQUEST_STATE_PATH,
    TRACE_PATH,
    RequestEndpoints,
)
from millrace.proxy.http.endpoints.responses import (
    RESPONSE_PATH,
    RESPONSES_PATH,
    CreateResponse,
    StoredEndpoints,
)
from millrace.proxy.http.endpoints.streams import STREAM_PATH, ResumeEndpoint
from millrace.proxy.http.front import Front, with_cors
from millrace.proxy.http.tenant_admin import (
    TENANT_PATH,
    TENANTS_PATH,
    StoredTenantAdmin,
    TenantAdmin,
)
from millrace.proxy.http.tenants import exchange_of
from millrace.proxy.models.asked_model import asked_model
from millrace.proxy.models.served_model import ServedModel
from millrace.proxy.request.pooled import POOLED_PATHS
from millrace.proxy.request.validation import Conversation
from millrace.version import version

log = logging.getLogger(__name__)

Json = dict[str, Any]
#: HEAD as well: load balancers and `curl -I` ask so.
_READ = ["GET", "HEAD"]
#: Renders the metrics of all workers for an Accept header: the exposition and its content type.
RenderMetrics = Callable[[str], Awaitable[tuple[bytes, str]]]


#: Answers a request and returns the status; raises ApiError while nothing was sent.
Answer = Callable[[Scope, Receive, Send], Awaitable[int]]


class RawEndpoint:
    """A raw ASGI application around an `Answer`: sends errors as answers and counts all answers."""

    def __init__(self, services: Services, route: str, answer: Answer) -> None:
        self._answered = services.metrics.answered
        self._limiter = services.limiter
        self._route = route
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        status = 499  # the client left before it had an answer
        try:
            status = await self._answer(scope, receive, send)
        except Disconnected:
            return
        except ApiError as error:
            status = error.status
            await self._limiter.look(exchange_of(scope))
            await send_error(scope, receive, send, error)
        except Exception:
            status = 500
            log.exception("%s failed", self._route)
            await send_error(scope, receive, send, ApiError(500, "Internal error."))
        finally:
            self._answered(self._route, status)


class GatewayApp(FastAPI):
    """FastAPI with raw routes that bypass it; its OpenAPI document describes them, too.

    A POST to a route in `raw` bypasses FastAPI: its ten layers of middleware and routing cost more
    time than the rest of a request. Every other request, a wrong method too, passes through them.
    """

    def __init__(self, services: Services, raw: Mapping[str, RawEndpoint]) -> None:
        super().__init__(title="Millrace gateway", version=version())
        self._models = services.models
        self._described = -1  # the list of models in the schema
        self._classes = services.objectives.classes
        self._raw = raw
        proxy = services.config.proxy
        logs = proxy.access_log == "on"
        front = Front(self._dispatch, services.tenants, services.metrics, raw.keys(), logs=logs)
        self._front = with_cors(front, proxy.cors_origins)
        self.router.routes.extend(Route(path, end, methods=["POST"]) for path, end in raw.items())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._front(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    async def _dispatch(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "POST":
            endpoint = self._raw.get(scope["path"])
            if endpoint is not None:
                await endpoint(scope, receive, send)
                return
        await super().__call__(scope, receive, send)

    def openapi(self) -> Json:
        if self._described != self._models.version:
            self._described = self._models.version
            self.openapi_schema = document(self._models, self._classes, self.title, self.version)
        return self.openapi_schema or {}


#: Answers a JSON body for one model with a JSON document.
Handle = Callable[[ServedModel, bytes], Awaitable[Json]]


class JsonEndpoint:
    """Answers a JSON body with a JSON document, by the model that the body names."""

    def __init__(self, services: Services, handle: Handle) -> None:
        self._max_body_bytes = services.config.proxy.max_body_bytes
        self._models = services.models
        self._handle = handle

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent. Raises ApiError before anything was sent."""
        body = await receive_body(scope, receive, self._max_body_bytes)
        name = asked_model(body) or self._models.first.name
        model = self._models.find(name, exchange_of(scope).caller)
        return await send_document(send, await self._handle(model, body))


async def tokenize(model: ServedModel, body: bytes) -> Json:
    """Answers /tokenize."""
    request = model.bodies.read_tokenize(body)
    if isinstance(request, Conversation):
        prompt = await model.prompts.read_chat(request)
    else:
        [prompt] = await model.prompts.read_completion(request)
    ids = prompt.ids.tolist()
    return {"count": len(ids), "max_model_len": model.limits.context_tokens, "tokens": ids}


async def detokenize(model: ServedModel, body: bytes) -> Json:
    """Answers /detokenize."""
    ids, skip = model.bodies.read_detokenize(body)
    return {"prompt": model.tokenizer.decode(ids, skip_special_tokens=skip)}


def create_app(services: Services, render_metrics: RenderMetrics) -> FastAPI:
    """Builds the application."""
    handlers: dict[str, Answer] = {
        "/v1/chat/completions": GenerateEndpoint(services, chat=True).answer,
        "/v1/completions": GenerateEndpoint(services, chat=False).answer,
        RESPONSES_PATH: CreateResponse(services).answer,
        MESSAGES_PATH: CreateMessage(services).answer,
        COUNT_PATH: JsonEndpoint(services, count_tokens).answer,
        **{path: PooledEndpoint(services, path).answer for path in POOLED_PATHS},
        "/tokenize": JsonEndpoint(services, tokenize).answer,
        "/detokenize": JsonEndpoint(services, detokenize).answer,
    }
    raw = {path: RawEndpoint(services, path, answer) for path, answer in handlers.items()}
    app = GatewayApp(services, raw)
    for route in ROUTES:
        admin = SchedulerAdmin(services.config.proxy, services.models.scheduler_of, route)
        endpoint = RawEndpoint(services, route.path, admin.answer)
        app.router.routes.append(Route(route.path, endpoint, methods=METHODS))
    events = BoardEvents(
        services.config.proxy, services.models.scheduler_of, lambda: services.models.draining
    )
    of_models = ModelsAdmin(
        services.config.proxy, lambda: [one.name for one in services.models.listed]
    )
    of_request = RequestAdmin(services.config.proxy, services.models.schedulers)
    of_trace = TraceAdmin(services.config.proxy, services.waterfalls)
    for path, answer in (
        (PAGE_PATH, show_page),
        (EVENTS_PATH, events.answer),
        (ADMIN_MODELS_PATH, of_models.answer),
        (REQUEST_PATH, of_request.answer),
        (ADMIN_TRACE_PATH, of_trace.answer),
    ):
        endpoint = RawEndpoint(services, path, answer)
        app.router.routes.append(Route(path, endpoint, methods=["GET"]))
    tenants = TenantAdmin(services.config, services.tenants.keys, services.limiter)
    endpoint = RawEndpoint(services, TENANTS_PATH, tenants.answer)
    app.router.routes.append(Route(TENANTS_PATH, endpoint, methods=["GET"]))
    stored = StoredTenantAdmin(services.config, services.stored_tenants)
    endpoint = RawEndpoint(services, TENANT_PATH, stored.answer)
    app.router.routes.append(Route(TENANT_PATH, endpoint, methods=["PUT", "DELETE"]))
    _add_responses(app, services)
    _add_conversations(app, services)
    calls = BatchCalls(handlers, services.tenants.keys, services.config.batches.slo_class)
    services.batches.serve(calls.ask)
    _add_files(app, services)
    _add_requests(app, services)
    _add_models(app, services)
    _add_probes(app, services, render_metrics)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _internal_error)
    return app


def _add_responses(app: FastAPI, services: Services) -> None:
    stored = StoredEndpoints(services)
    for path, answer, methods in (
        (RESPONSE_PATH, stored.retrieve_or_delete, ["GET", "DELETE"]),
        (RESPONSE_PATH + "/cancel", stored.cancel, ["POST"]),
        (RESPONSE_PATH + "/input_items", stored.input_items, ["GET"]),
    ):
        endpoint = RawEndpoint(services, path, answer)
        app.router.routes.append(Route(path, endpoint, methods=methods))


def _add_conversations(app: FastAPI, services: Services) -> None:
    conversations = ConversationEndpoints(services)
    for path, answer, methods in (
        (CONVERSATIONS_PATH, conversations.create, ["POST"]),
        (CONVERSATION_PATH, conversations.one, ["GET", "POST", "DELETE"]),
        (ITEMS_PATH, conversations.items, ["GET", "POST"]),
        (ITEM_PATH, conversations.item, ["GET", "DELETE"]),
    ):
        endpoint = RawEndpoint(services, path, answer)
        app.router.routes.append(Route(path, endpoint, methods=methods))


def _add_files(app: FastAPI, services: Services) -> None:
    files = FileEndpoints(services.files, services.tenants)
    batches = BatchEndpoints(services.batches, services.tenants)
    for path, answer, methods in (
        (FILES_PATH, files.create_or_list, ["GET", "POST"]),
        (FILE_PATH, files.retrieve_or_delete, ["GET", "DELETE"]),
        (FILE_PATH + "/content", files.content, ["GET"]),
        (BATCHES_PATH, batches.create_or_list, ["GET", "POST"]),
        (BATCH_PATH, batches.retrieve, ["GET"]),
        (BATCH_PATH + "/cancel", batches.cancel, ["POST"]),
    ):
        endpoint = RawEndpoint(services, path, answer)
        app.router.routes.append(Route(path, endpoint, methods=methods))


def _add_requests(app: FastAPI, services: Services) -> None:
    requests = RequestEndpoints(services)
    resume = ResumeEndpoint(
        services.streams,
        services.store,
        services.replays,
        services.tenants,
        services.config.proxy,
    )
    for path, answer in (
        (REQUEST_STATE_PATH, requests.show),
        (EXPLAIN_PATH, requests.explain),
        (TRACE_PATH, requests.trace),
        (STREAM_PATH, resume.answer),
    ):
        endpoint = RawEndpoint(services, path, answer)
        app.router.routes.append(Route(path, endpoint, methods=["GET"]))


def _add_models(app: FastAPI, services: Services) -> None:
    models = ModelEndpoints(services.models)
    listed = RawEndpoint(services, MODELS_PATH, models.list)
    shown = RawEndpoint(services, MODEL_PATH, models.show)
    app.router.routes.append(Route(MODELS_PATH, listed, methods=_READ))
    tokenizer = RawEndpoint(services, TOKENIZER_PATH, models.tokenizer)
    app.router.routes.append(Route(TOKENIZER_PATH, tokenizer, methods=_READ))
    with_slashes = MODEL_PATH.replace("}", ":path}")
    app.router.routes.append(Route(with_slashes, shown, methods=_READ))


def _add_probes(app: FastAPI, services: Services, render_metrics: RenderMetrics) -> None:
    @app.api_route("/health", methods=_READ)
    async def health() -> Response:
        return _json({"status": "ok"})

    @app.api_route("/ready", methods=_READ)
    async def ready() -> Response:
        if services.models.ready:
            return _json({"status": "ready"})
        return _json({"status": "not ready"}, 503)

    @app.api_route("/metrics", methods=_READ)
    async def metrics(request: Request) -> Response:
        body, content_type = await render_metrics(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})


def _json(document: Json, status: int = 200) -> Response:
    return Response(orjson.dumps(document), status, media_type="application/json")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # it is registered for these
    if error.status_code == 404:
        message = no_route(request.method, request.url.path)
        found = ApiError(404, message, code="not_found")
    elif error.status_code == 405:
        found = ApiError(405, f"{request.method} is not allowed here.", code="method_not_allowed")
    else:
        found = ApiError(error.status_code, str(error.detail))
    body = error_body(request.scope, found)
    return Response(body, found.status, headers=error.headers, media_type="application/json")


async def _internal_error(request: Request, error: Exception) -> Response:
    """Answers 500: the traceback goes to the log, not to the client."""
    body = error_body(request.scope, ApiError(500, "Internal error."))
    return Response(body, 500, media_type="application/json")
