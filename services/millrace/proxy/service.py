"""Assembles one proxy process, serves and shuts down."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import socket
import time
import uuid
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import uvicorn

from millrace.core.config import Config
from millrace.core.config.models import ModelConfig
from millrace.core.errors import MillraceError
from millrace.core.incarnation import Incarnation
from millrace.file_limit import file_limit, most_clients
from millrace.listening import bound_socket
from millrace.proxy.background import Background
from millrace.proxy.batches.opening import open_batches, open_files
from millrace.proxy.conversations import Conversations
from millrace.proxy.fleet.gateway import Gateway
from millrace.proxy.http.app import RenderMetrics, create_app
from millrace.proxy.http.connection import Connection, at_most
from millrace.proxy.http.endpoints.generate import Services
from millrace.proxy.http.endpoints.objectives import Objectives
from millrace.proxy.http.tenants import Tenants
from millrace.proxy.metrics import ModelMetrics, ProxyMetrics
from millrace.proxy.models.models import Models
from millrace.proxy.responses import StoredResponses
from millrace.proxy.streams.latest_records import LatestRecords
from millrace.proxy.streams.lives import StreamLives
from millrace.proxy.streams.owned_stream import Shared
from millrace.proxy.streams.owner import OwnedStreams
from millrace.proxy.streams.replay import Replays
from millrace.proxy.tenancy.limiter import Limiter
from millrace.proxy.tenancy.stored_tenants import StoredTenants
from millrace.proxy.tracing.handed_on import StreamWaterfalls
from millrace.proxy.tracing.shared import LatestRecord, SharedWaterfalls
from millrace.proxy.tracing.stored_texts import StoredTexts
from millrace.proxy.tracing.traces import RequestTraces
from millrace.proxy.tracing.waterfalls import RecentWaterfalls, Waterfalls
from millrace.state.leader import LeaderWatch
from millrace.state.open import (
    open_begun_waterfalls,
    open_documents,
    open_leases,
    open_limits,
    open_store,
    open_streams,
    open_tenant_tables,
    open_waterfalls,
)
from millrace.state.store import RequestStore
from millrace.state.streams import StreamStore
from millrace.telemetry.otlp.exports import Exports
from millrace.telemetry.tracing.tracer import open_tracer
from millrace.telemetry.vllm_names import add_vllm_names

log = logging.getLogger(__name__)

_KEEP_CONNECTION_S = 75
_BACKLOG = 2048
#: The time after the drain in which cancelled streams send their error and close.
_CLOSE_S = 5.0


def listen(host: str, port: int, *, shared: bool = False) -> socket.socket:
    """Works as `bound_socket`. Raises MillraceError if the address can't be bound."""
    try:
        return bound_socket(host, port, shared=shared)
    except OSError as error:
        raise MillraceError(f"proxy.host {host}, proxy.port {port}: {error.strerror}") from error


class _HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers: the service decides when it stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Proxy:
    """One proxy process: an HTTP server before the gateways of its models."""

    def __init__(self, config: Config, model: ModelConfig | None = None) -> None:
        """Reads the small files of `model`, or else of the models of `proxy.models_file`.

        Raises ModelError, ConfigError.
        """
        self._config = config
        self._process_id = process_id = f"proxy-{uuid.uuid4().hex[:8]}"
        numbers = itertools.count(1)
        self.store = open_store(config.store)
        self._leases = open_leases(config.store)
        self.metrics = ProxyMetrics(lambda: self.models.measured())
        if config.telemetry.vllm_names == "on":
            add_vllm_names(self.metrics.registry)
        recent = RecentWaterfalls(config.telemetry.waterfall_bytes)
        named = "proxy", process_id
        tracer = open_tracer(config.telemetry, *named)
        self._exports = Exports(config.telemetry, *named, self.metrics.registry)
        self._traces = traces = RequestTraces(tracer, recent)

        def make_gateway(name: str, settings: Config, scheduler: str) -> Gateway:
            # Of its own: a model's old and new gateways may have the same fleet.
            gateway_id = f"{process_id}-{next(numbers)}"
            gateway = Gateway(
                incarnation=Incarnation(gateway_id, time.time_ns()),
                leaders=LeaderWatch(self._leases, scheduler),
                store=self.store,
                config=settings.proxy,
                request_timeout_s=settings.scheduler.request_timeout_s,
                metrics=ModelMetrics(self.metrics.models, name),
            )
            gateway.intake.on_late = partial(traces.late, tell=gateway.keep_trace)
            return gateway

        self.models = Models(config, model, make_gateway)
        self.waterfalls = Waterfalls(recent, self.models.open_requests)
        streams = open_streams(config.store)
        latest = LatestRecords(self.store, streams).find
        self._shared = self._share(recent, latest) if config.telemetry.waterfall_bytes else None
        begun = open_begun_waterfalls(config.store) if config.telemetry.waterfall_bytes else None
        texts = None if begun is None else StoredTexts(begun)
        of_streams = StreamWaterfalls(recent, texts)
        stores = _Stores(self.store, streams)
        parts = self.models, stores, self.metrics, traces, self.waterfalls, of_streams
        self._services = _services(config, process_id, *parts)
        self._server: _HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self.port = 0

    def _share(self, recent: RecentWaterfalls, latest: LatestRecord) -> SharedWaterfalls | None:
        """Shares the waterfalls with other replicas, if there can be any."""
        store = open_waterfalls(self._config.store)
        if store is None:
            return None
        shared = SharedWaterfalls(StoredTexts(store), latest)
        recent.share, self.waterfalls.ask_store = shared.add, shared.find
        return shared

    async def start(
        self, bound: socket.socket, render_metrics: RenderMetrics | None = None
    ) -> None:
        """Starts the server, which accepts connections on `bound` when this method returns."""
        self.port = bound.getsockname()[1]
        self._exports.start()
        app = create_app(self._services, render_metrics or self.render)
        http = uvicorn.Config(
            app,
            http=self._connections(),
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
        self.models.start()
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
        log.info("proxy %s serves on port %d", self._process_id, self.port)

    def _connections(self) -> type[Connection]:
        """Returns the class of connections, with limits; says so if they are too low."""
        files, wanted = file_limit(), self._config.proxy.max_inflight
        if (most := most_clients(files)) < wanted:
            log.warning(
                "proxy.max_inflight is %d, and %d clients can be connected: a process may have %d "
                "files open here (ulimit -n)",
                *(wanted, most, files),
            )
        return at_most(most, (files - most) // 4)

    @property
    def gateway(self) -> Gateway:
        """The first model's gateway."""
        return self.models.first.gateway

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
        self.models.drain()
        await asyncio.wait({self._serving}, timeout=self._config.proxy.drain_timeout_s)
        if not self._serving.done():
            log.warning("cancelling %d requests that outlast the drain", self.models.inflight)
        await self._services.streams.close()
        await self.models.close()
        await self._services.background.close()
        await self._serving
        await self._services.responses.close()
        await self._services.files.close()
        await self._services.limiter.close()
        if self._services.stored_tenants is not None:
            await self._services.stored_tenants.close()
        if self._shared is not None:
            await self._shared.close(2.0)
        await self.store.close()
        await self._leases.close()
        await asyncio.to_thread(self._traces.close)
        await self._exports.close()


class _Stores(NamedTuple):
    requests: RequestStore
    streams: StreamStore


def _services(
    config: Config,
    process_id: str,
    models: Models,
    stores: _Stores,
    metrics: ProxyMetrics,
    traces: RequestTraces,
    waterfalls: Waterfalls,
    of_streams: StreamWaterfalls,
) -> Services:
    files = open_files(config)
    replays = Replays(models)
    lives = StreamLives(
        grace_s=config.proxy.resume_grace_s,
        ttl_s=config.store.ttl_s,
        finished_ttl_s=config.store.finished_ttl_s,
    )
    limiter = Limiter(open_limits(config.store), metrics.tenants)
    store = stores.requests
    shared = Shared(stores.streams, store, lives, of_streams, metrics.streams)
    streams = OwnedStreams(shared, models, replays, limiter)
    tenants = Tenants(config, metrics.tenants)
    stored = None
    if config.auth.stored_keys == "on":
        stored = StoredTenants(open_tenant_tables(config.store), tenants.keys)
    documents = open_documents(config.store)
    responses = StoredResponses(documents, config.store.responses_ttl_s)
    return Services(
        config=config,
        models=models,
        store=store,
        streams=streams,
        replays=replays,
        metrics=metrics,
        objectives=Objectives(config),
        tenants=tenants,
        stored_tenants=stored,
        limiter=limiter,
        responses=responses,
        conversations=Conversations(documents, config.store.responses_ttl_s),
        background=Background(responses),
        files=files,
        batches=open_batches(
            config,
            files,
            owner=process_id,
            is_ready=models.is_ready,
            check_model=models.named,
            metrics=metrics.batches,
        ),
        traces=traces,
        waterfalls=waterfalls,
    )
