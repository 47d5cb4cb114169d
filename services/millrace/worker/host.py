"""What every worker process does beside its role: identity, engine, transport, store, servers, drain."""

from __future__ import annotations

import asyncio
import logging
import signal
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

import grpc

from millrace.core.config import Config
from millrace.core.latency import Latency
from millrace.engine.assembly import Engine, calibrate, open_engine
from millrace.state import open_store
from millrace.state.store import RequestStore
from millrace.telemetry.metrics import serve_metrics
from millrace.transfer.nixl_transport import NixlTransport
from millrace.transfer.transport import Transport
from millrace.wire.pb import common_pb2, scheduler_pb2
from millrace.wire.server import add_health, bind, create_server
from millrace.worker.link import WorkerLink

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Where a worker stands. `scheduler` and the own address are host:port."""

    model: str
    model_name: str
    scheduler: str
    instance_id: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    drain_timeout_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext:
    """What a role is built from. `send` may be called from any thread."""

    config: Config
    incarnation: common_pb2.Incarnation
    engine: Engine
    transport: Transport
    store: RequestStore
    send: Callable[[scheduler_pb2.WorkerMessage], None]


class Role(Protocol):
    """The part of a worker that differs between prefill and decode instances."""

    name: str

    def attach(self, server: grpc.aio.Server) -> None:
        """Adds the role's gRPC services."""

    def on_command(self, command: scheduler_pb2.WorkerCommand) -> None:
        """Takes one command of the scheduler; returns at once."""

    def heartbeat(self) -> scheduler_pb2.Heartbeat: ...

    def fill_register(self, register: scheduler_pb2.Register) -> None:
        """Adds what only this role knows."""

    async def run(self) -> None:
        """Works until cancelled."""

    async def drop_all(self, reason: str) -> None:
        """Gives up every request; returns when nothing of them is left."""

    @property
    def busy(self) -> bool:
        """Whether any request still holds something here."""

    async def close(self) -> None: ...


async def serve_worker(
    options: WorkerOptions,
    config: Config,
    build: Callable[[WorkerContext], Role],
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Runs one worker until SIGTERM or SIGINT, then drains it.

    on_ready gets the gRPC port once the scheduler has taken the registration.
    """
    stop = stop_event()
    loop = asyncio.get_running_loop()
    engine = await asyncio.to_thread(open_engine, options.model, config.engine)
    log.info(
        "loaded %s on %s: %d KV pages of %d tokens",
        engine.folder.name,
        engine.device,
        engine.layout.num_pages,
        engine.layout.page_tokens,
    )
    transport = NixlTransport(f"{options.instance_id}-{uuid.uuid4().hex[:8]}")
    store = open_store(config.store)
    incarnation = common_pb2.Incarnation(
        id=options.instance_id or f"worker-{uuid.uuid4().hex[:8]}", generation=time.time_ns()
    )
    links: list[WorkerLink] = []

    def send(message: scheduler_pb2.WorkerMessage) -> None:
        loop.call_soon_threadsafe(links[0].send, message)

    role = build(
        WorkerContext(
            config=config,
            incarnation=incarnation,
            engine=engine,
            transport=transport,
            store=store,
            send=send,
        )
    )
    server = create_server()
    role.attach(server)
    health = add_health(server, [])
    port = bind(server, options.host, options.port)
    await server.start()
    latency = await asyncio.to_thread(calibrate, engine)

    def register() -> scheduler_pb2.Register:
        message = _register(options, incarnation, engine, latency, port)
        role.fill_register(message)
        return message

    link = WorkerLink(
        options.scheduler,
        register=register,
        heartbeat=role.heartbeat,
        on_command=role.on_command,
        on_lost=lambda: role.drop_all("the scheduler's stream was lost"),
    )
    links.append(link)
    metrics = await serve_metrics(
        config.telemetry.metrics_port, ready=lambda: link.connected.is_set() and not stop.is_set()
    )
    tasks = [asyncio.create_task(link.run()), asyncio.create_task(role.run())]
    try:
        await _until(link.connected.wait(), stop, *tasks)
        if not stop.is_set():
            health.set_serving(True)
            log.info("%s %s serves on %s:%d", role.name, incarnation.id, options.host, port)
            if on_ready is not None:
                on_ready(port)
            await _until(stop.wait(), stop, *tasks)
        health.set_serving(False)
        await _drain(role, link, options.drain_timeout_s)
    finally:
        link.close()
        await asyncio.wait(tasks[:1], timeout=2)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await server.stop(grace=1)
        await role.close()
        await asyncio.to_thread(transport.close)
        await store.close()
        if metrics is not None:
            await metrics.close()


def stop_event() -> asyncio.Event:
    """An event that SIGTERM and SIGINT set."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    return stop


async def _until(
    wanted: Awaitable[object], stop: asyncio.Event, *workers: asyncio.Task[None]
) -> None:
    """Waits for `wanted` or `stop`; a worker task that ends first takes its error here."""
    waits = [asyncio.ensure_future(wanted), asyncio.ensure_future(stop.wait())]
    await asyncio.wait([*waits, *workers], return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    for worker in workers:
        if worker.done():
            worker.result()


async def _drain(role: Role, link: WorkerLink, timeout_s: float) -> None:
    """Tells the scheduler, lets what runs finish, and drops what is left at the deadline."""
    link.send(scheduler_pb2.WorkerMessage(draining=scheduler_pb2.Draining()))
    deadline_s = time.monotonic() + timeout_s
    while role.busy and link.connected.is_set() and time.monotonic() < deadline_s:
        await asyncio.sleep(0.02)
    await role.drop_all("the instance is shutting down")


def _register(
    options: WorkerOptions,
    incarnation: common_pb2.Incarnation,
    engine: Engine,
    latency: Latency,
    port: int,
) -> scheduler_pb2.Register:
    return scheduler_pb2.Register(
        incarnation=incarnation,
        address=f"{options.host}:{port}",
        model=options.model_name,
        model_hash=engine.model_hash,
        kv_pages=engine.layout.num_pages,
        page_tokens=engine.layout.page_tokens,
        max_context_tokens=engine.max_context_tokens,
        latency=scheduler_pb2.LatencyCoefficients(
            a=latency.a, b=latency.b, c=latency.c, d=latency.d
        ),
    )
