"""Assembles one proxy process, serves and shuts down."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import uvicorn

from millrace.core.config import Config
from millrace.core.errors import MillraceError
from millrace.core.kv.transfer import Incarnation
from millrace.grammar.matcher import Grammars
from millrace.proxy.background import Background
from millrace.proxy.batches.opening import open_batches, open_files
from millrace.proxy.fleet.gateway import Gateway
from millrace.proxy.http.app import RenderMetrics, create_app
from millrace.proxy.http.generate import Services
from millrace.proxy.http.objectives import Objectives
from millrace.proxy.http.tenants import Tenants
from millrace.proxy.metrics import ProxyMetrics
from millrace.proxy.model_card import ModelCard, read_model_card
from millrace.proxy.parsing.families import choose_parsers
from millrace.proxy.prompts import PromptReader
from millrace.proxy.reply.builder import Builder
from millrace.proxy.request.options import Limits
from millrace.proxy.request.pooled import PooledBodies
from millrace.proxy.request.validation import Bodies
from millrace.proxy.responses import StoredResponses
from millrace.proxy.streams.owner import OwnedStreams, StreamLives
from millrace.proxy.streams.replay import Replays
from millrace.proxy.tenancy.limiter import Limiter
from millrace.proxy.tenancy.stored_tenants import StoredTenants
from millrace.proxy.text.chat_template import ChatTemplate
from millrace.proxy.text.tokenizer import Tokenizer
from millrace.state.open import (
    open_documents,
    open_limits,
    open_store,
    open_streams,
    open_tenant_tables,
)
from millrace.state.store import RequestStore
from millrace.telemetry.otlp import open_traces

log = logging.getLogger(__name__)

_KEEP_CONNECTION_S = 75
_BACKLOG = 2048
#: The time after the drain in which cancelled streams send their error and close.
_CLOSE_S = 5.0


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Returns a bound TCP socket; `shared`: other processes may bind the port, too (SO_REUSEPORT).

    Raises MillraceError if the address can't be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise MillraceError(f"proxy.host {host}, proxy.port {port}: {error.strerror}") from error
    bound.setblocking(False)
    return bound


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the service decides when it stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Proxy:
    """One proxy process: an HTTP server before a gateway."""

    def __init__(
        self, config: Config, *, model: str, model_name: str | None = None, scheduler: str
    ) -> None:
        """Reads the model's small files. Raises ModelError."""
        self._config = config
        self._scheduler = scheduler
        card = read_model_card(model, config.engine.max_context_tokens)
        incarnation = Incarnation(f"proxy-{uuid.uuid4().hex[:8]}", time.time_ns())
        self.store = open_store(config.store)
        self.metrics = ProxyMetrics(lambda: self.gateway.inflight, lambda: self.gateway.parked)
        self.gateway = Gateway(
            incarnation=incarnation,
            scheduler=scheduler,
            store=self.store,
            config=config.proxy,
            metrics=self.metrics,
        )
        self._services = _services(config, card, model_name, self.gateway, self.store, self.metrics)
        self._server: _HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    async def start(
        self, bound: socket.socket, render_metrics: RenderMetrics | None = None
    ) -> None:
        """Starts the server, which accepts connections on `bound` when this method returns."""
        self.port = bound.getsockname()[1]
        app = create_app(
            self._services,
            int(time.time_ns() // 10**9),
            render_metrics or self.render,
            self._scheduler,
        )
        http = uvicorn.Config(
            app,
            http="httptools",
            loop="none",
            ws="none",
            lifespan="off",
            access_log=False,
            log_config=None,
            server_header=False,
            proxy_headers=False,
            backlog=_BACKLOG,
            timeout_keep_alive=_KEEP_CONNECTION_S,
            timeout_graceful_shutdown=int(self._config.proxy.drain_timeout_s + _CLOSE_S) + 1,
        )
        self._server = server = _HttpServer(http)
        self.gateway.start()
        self._services.files.start()
        self._services.batches.start()
        if self._services.stored_tenants is not None:
            await self._services.stored_tenants.start()
        self._serving = asyncio.create_task(server.serve([bound]))
        while not server.started:
            if self._serving.done():
                self._serving.result()
                raise MillraceError("the HTTP server ended before it began")
            await asyncio.sleep(0.005)
        log.info("proxy %s serves on port %d", self.gateway.incarnation.id, self.port)

    async def render(self, accept: str) -> tuple[bytes, str]:
        """Returns the metrics of this process."""
        return self.metrics.registry.render(accept)

    async def run_until(self, stop: asyncio.Event) -> None:
        """Serves until `stop` is set, then shuts down."""
        assert self._serving is not None, "start() comes first"
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({stopped, self._serving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            stopped.cancel()
            await self.stop()

    async def stop(self) -> None:
        """Stops accepting, lets streams finish, cancels streams that outlast the drain's time."""
        assert self._server is not None and self._serving is not None, "start() comes first"
        self._server.should_exit = True
        await self._services.batches.close()
        self.gateway.drain()
        await asyncio.wait({self._serving}, timeout=self._config.proxy.drain_timeout_s)
        if not self._serving.done():
            log.warning("cancelling %d requests that outlast the drain", self.gateway.inflight)
        await self._services.streams.close()
        await self.gateway.close()
        await self._services.background.close()
        await self._serving
        await self._services.responses.close()
        await self._services.files.close()
        await self._services.limiter.close()
        if self._services.stored_tenants is not None:
            await self._services.stored_tenants.close()
        await self.store.close()
        self._services.tokenizer.close()
        self._services.grammars.close()
        if self._services.traces is not None:
            await asyncio.to_thread(self._services.traces.close)


def _services(
    config: Config,
    card: ModelCard,
    model_name: str | None,
    gateway: Gateway,
    store: RequestStore,
    metrics: ProxyMetrics,
) -> Services:
    tokenizer = Tokenizer(card)
    embedding = card.embedding
    if config.proxy.pooling != "auto":
        embedding = replace(embedding, pooling=config.proxy.pooling)
    limits = Limits(
        model=model_name or card.folder.resolve().name,
        vocab_size=card.vocab_size,
        context_tokens=card.context_tokens,
        eos_token_ids=card.eos_token_ids,
        defaults=card.defaults,
        embedding=embedding,
        config=config.proxy,
    )
    parsers = choose_parsers(
        card.chat_template,
        tools=config.proxy.tool_parser,
        reasoning=config.proxy.reasoning_parser,
    )
    template = None
    if card.chat_template is not None:
        template = ChatTemplate(card.chat_template, card.special_tokens)
    files = open_files(config)
    bodies, prompts = Bodies(limits), PromptReader(limits, tokenizer, template, parsers)
    builders = partial(Builder, limits, tokenizer, gateway.incarnation, parsers)
    replays = Replays(bodies, builders)
    lives = StreamLives(
        grace_s=config.proxy.resume_grace_s,
        ttl_s=config.store.ttl_s,
        finished_ttl_s=config.store.finished_ttl_s,
    )
    streams = OwnedStreams(open_streams(config.store), store, gateway, replays, metrics, lives)
    tenants = Tenants(config, metrics.tenants)
    stored = None
    if config.auth.stored_keys == "on":
        stored = StoredTenants(open_tenant_tables(config.store), tenants.keys)
    responses = StoredResponses(open_documents(config.store), config.store.responses_ttl_s)
    return Services(
        config=config,
        limits=limits,
        bodies=bodies,
        pooled=PooledBodies(limits),
        tokenizer=tokenizer,
        grammars=Grammars(card.folder, card.vocab_size, card.eos_token_ids),
        prompts=prompts,
        gateway=gateway,
        store=store,
        streams=streams,
        replays=replays,
        metrics=metrics,
        objectives=Objectives(config),
        tenants=tenants,
        stored_tenants=stored,
        limiter=Limiter(open_limits(config.store), metrics.tenants),
        responses=responses,
        background=Background(responses),
        files=files,
        batches=open_batches(
            config,
            files,
            owner=gateway.incarnation.id,
            is_ready=lambda: gateway.ready,
            check_model=bodies.check_model,
            metrics=metrics.batches,
        ),
        traces=open_traces(config.telemetry, "proxy") if config.telemetry.otlp_endpoint else None,
    )
