"""Runs a worker process of any role: memory, transport, store, servers, drain."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import platform
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import grpc
import torch

from millrace.concurrency import cancel, stop_event
from millrace.core.config import Config, EngineConfig
from millrace.core.errors import ConfigError, MillraceError
from millrace.core.incarnation import Incarnation
from millrace.core.kv.layout import KvLayout
from millrace.core.scheduler.commands import Command, KeepTraces
from millrace.core.scheduler.reports import Draining, Registration
from millrace.engine.assembly import Engine, KvMemory, open_engines, resolve_device
from millrace.instance.gauges import add_gauges
from millrace.instance.latency import decode_step, decode_table, prefill_latency
from millrace.instance.link import WorkerLink
from millrace.instance.role import HostContext, Instance, Loaded, Role, WorkerContext
from millrace.instance.stages.stages import open_staged_engine
from millrace.instance.tasks import first_of, stacks
from millrace.instance.transfer.kv_path import KvPath
from millrace.instance.transfer.probe_servicer import ProbeServicer
from millrace.instance.transfer.transports import (
    KvTransport,
    open_transport,
    serve_member,
    set_environment,
)
from millrace.instance.vitals import Vitals, open_vitals
from millrace.instance.watch import check_idle, watch
from millrace.state.leader import LeaderWatch
from millrace.state.open import open_leases, open_store
from millrace.telemetry.metrics import Registry
from millrace.telemetry.otlp.exports import Exports
from millrace.telemetry.tracing.tracer import Tracer, open_tracer
from millrace.telemetry.vllm_names import add_vllm_names
from millrace.wire.address import host_port
from millrace.wire.server import Health, add_health, bind, create_server

log = logging.getLogger(__name__)

PROGRESS_EVERY_S = 2.0
LINK_CLOSE_S = 2.0
#: Time to release the dropped requests at the end of a drain. Only a stopped peer takes longer.
DROP_TIMEOUT_S = 8.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """The placement and addresses of a worker. Addresses are host:port.

    `scheduler` has one or more, separated by commas: the store names the leader among them.
    """

    model: str
    model_name: str
    scheduler: str
    instance_id: str = ""
    host: str = "127.0.0.1"
    port: int = 0
    drain_timeout_s: float = 30.0
    node: str = ""  # the worker's node; empty: the machine's name
    revision: str = ""  # of the model


async def serve_worker(
    options: WorkerOptions,
    config: Config,
    build: Callable[[WorkerContext], Role],
    on_ready: Callable[[int], None] | None = None,
    decodes: bool = False,
) -> None:
    """Runs one worker until SIGTERM, SIGINT or SIGHUP, then drains it.

    on_ready gets the gRPC port when the scheduler has accepted the registration: weights are loaded
    and KV can be transferred (`kv_path.py`). Raises MillraceError for a model that can't be served,
    settings that can't be met and KV that can't leave this process, and any error that ends the
    role or the link: a worker that can't work must not look alive.
    """
    stop = stop_event()
    async with open_vitals(config.telemetry, options.host) as vitals:
        (engine,) = await asyncio.to_thread(open_for, options, config, 1)
        timed = _timed_decode if decodes else _timed_prefill
        loaded = await asyncio.to_thread(timed, engine, config.engine, vitals)
        await serve_role(options, config, build, loaded, stop, on_ready)


def _timed_prefill(engine: Engine, config: EngineConfig, vitals: Vitals) -> Loaded:
    latency = prefill_latency(engine, config, config.stages)
    return Loaded(role="prefill", engine=engine, vitals=vitals, latency=latency)


def _timed_decode(engine: Engine, config: EngineConfig, vitals: Vitals) -> Loaded:
    table = decode_table(engine, config)
    step = decode_step(engine, config, table)
    return Loaded(role="decode", engine=engine, vitals=vitals, decode_step=step, decode_table=table)


async def serve_role(
    options: WorkerOptions,
    config: Config,
    build: Callable[[WorkerContext], Role],
    loaded: Loaded,
    stop: asyncio.Event,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Serves a loaded engine as `serve_worker` does, until `stop`."""
    instance = Instance(
        role=loaded.role,
        memory=loaded.engine,
        vitals=loaded.vitals,
        build=lambda host: build(
            WorkerContext.of(host, loaded.engine, loaded.decode_step, loaded.decode_table)
        ),
        latency=loaded.latency,
    )
    await serve_instance(options, config, instance, stop, on_ready)


async def serve_instance(
    options: WorkerOptions,
    config: Config,
    instance: Instance,
    stop: asyncio.Event,
    on_ready: Callable[[int], None] | None = None,
) -> None:
    """Serves an instance with open memory as `serve_worker` does, until `stop`."""
    memory, registry = instance.memory, instance.vitals.registry
    incarnation = Incarnation(
        options.instance_id or f"worker-{uuid.uuid4().hex[:8]}", time.time_ns()
    )
    async with contextlib.AsyncExitStack() as stack:
        stack.callback(memory.close)
        on_corrupt = _count_corrupt(registry)
        kv, probes = await open_transport(
            stack,
            options.host,
            incarnation,
            memory,
            checksums=config.transfer.kv_checksum == "on",
            on_corrupt=on_corrupt,
        )
        store = open_store(config.store)
        stack.push_async_callback(store.close)
        loop = asyncio.get_running_loop()
        tracer = _open_tracer(stack, config, instance.role, incarnation.id, registry)
        role = instance.build(
            HostContext(
                config=config,
                incarnation=incarnation,
                transport=kv.transport,
                store=store,
                registry=registry,
                tracer=tracer,
                on_corrupt=on_corrupt,
                send=lambda report: link.send(report),
                send_threadsafe=lambda report: loop.call_soon_threadsafe(link.send, report),
            )
        )
        stack.push_async_callback(role.close)
        _expose(registry, role, memory, config, options)
        kv_path = KvPath(incarnation, probes.open_end, registry)
        server, health, port = await _start_server(
            role, kv_path, options, str(memory.storage.device)
        )
        stack.push_async_callback(server.stop, grace=1)

        def register() -> Registration:
            base = _registration(options, incarnation, role.name, instance, port)
            return role.complete_registration(base)

        leases = open_leases(config.store)
        stack.push_async_callback(leases.close)
        leaders = LeaderWatch(leases, options.scheduler)
        link = WorkerLink(
            leaders,
            register=register,
            heartbeat=role.heartbeat,
            cached_blocks=role.cached_blocks,
            on_command=partial(_on_command, role, tracer),
        )
        tasks = [
            asyncio.create_task(role.run(), name=f"the {role.name} loop"),
            asyncio.create_task(leaders.run(), name="the watch over the schedulers"),
            asyncio.create_task(watch(memory), name="the watch over the engine"),
        ]
        stack.push_async_callback(lambda: cancel(*tasks))
        proof = _prove(kv_path, role, kv, memory.layout, options.scheduler)
        await first_of([proof, stop.wait()], tasks)
        if stop.is_set():
            return
        tasks.append(asyncio.create_task(link.run(), name="the link to the scheduler"))
        stack.push_async_callback(_end_link, link, tasks[-1])
        instance.vitals.ready = link.connected.is_set
        await first_of([link.connected.wait(), stop.wait()], tasks)
        await health.set_serving(True)
        log.info("%s %s serves on %s", role.name, incarnation.id, host_port(options.host, port))
        if on_ready is not None and not stop.is_set():
            on_ready(port)
        await first_of([stop.wait()], tasks)
        await health.set_serving(False)
        await first_of([_drain(role, link, options.drain_timeout_s)], tasks)
        check_idle(role, memory)


def _count_corrupt(registry: Registry) -> Callable[[str], None]:
    counter = registry.counter(
        "millrace_kv_checksum_errors_total",
        "writes and messages with another checksum than was sent; their requests begin again",
        ["sender"],
    )
    return lambda sender: counter.labels(sender).inc()


def _expose(
    registry: Registry, role: Role, memory: KvMemory, config: Config, options: WorkerOptions
) -> None:
    """Adds the gauges of every role, and vLLM's names if they are wanted."""
    add_gauges(registry, role, memory)
    if config.telemetry.vllm_names == "on":
        add_vllm_names(registry, options.model_name)


def _open_tracer(
    stack: contextlib.AsyncExitStack,
    config: Config,
    role: str,
    instance_id: str,
    registry: Registry,
) -> Tracer:
    """Opens what the instance sends to a collector; returns the tracer."""
    Exports(config.telemetry, role, instance_id, registry).start_in(stack)
    tracer = open_tracer(config.telemetry, role, instance_id, registry)
    stack.push_async_callback(asyncio.to_thread, tracer.close)
    return tracer


def _on_command(role: Role, tracer: Tracer, command: Command) -> None:
    if isinstance(command, KeepTraces):
        tracer.keep([int(trace_id, 16) for trace_id in command.trace_ids])
    else:
        role.on_command(command)


async def _start_server(
    role: Role, kv_path: KvPath, options: WorkerOptions, device: str
) -> tuple[grpc.aio.Server, Health, int]:
    """Starts the role's gRPC server; returns the server, its health and its port."""
    server = create_server()
    role.attach(server)
    ProbeServicer(kv_path, options.scheduler, device).add_to(server)
    health = add_health(server, [f"millrace.v1.{role.name.capitalize()}"])
    port = bind(server, options.host, options.port)
    await server.start()
    return server, health, port


async def _prove(
    kv_path: KvPath, role: Role, kv: KvTransport, layout: KvLayout, scheduler: str
) -> None:
    """Returns when KV was transferred within this process, and to and from a peer if any exists."""
    parts = {pool.name: pool.start for pool in layout.member_pools}
    await kv_path.check_own(kv.transport, role.kv_region, kv.pools, parts)
    await kv_path.reach_peers(scheduler, role.name)


def open_for(options: WorkerOptions, config: Config, count: int) -> list[Engine]:
    """Opens `count` engines or one staged engine; logs the progress and the result."""
    check_devices(config.engine, resolve_device(config.engine.device))
    stages, version = config.engine.stages, {"revision": options.revision}
    if stages > 1 and count > 1:
        raise ConfigError(
            f"engine.stages is {stages}; instances that share their weights can have 1"
        )
    if stages > 1:
        set_environment(options.host)
        progress = _log_progress()
        checksums = config.transfer.kv_checksum == "on"
        engines = [
            open_staged_engine(
                options.model,
                config.engine,
                options.host,
                progress,
                options.revision,
                checksums=checksums,
                transport=serve_member,
            )
        ]
    else:
        set_environment(options.host)  # which the ranks inherit
        engines = open_engines(
            options.model, config.engine, count, _log_progress(), **version, transport=serve_member
        )
    log_memory("loaded", engines[0])
    return engines


def check_devices(config: EngineConfig, device: torch.device) -> None:
    """Raises ConfigError when this process does not see a GPU for each rank of each stage."""
    needed = config.tensor_parallel * (1 if config.stage_hosts else config.stages)
    if needed == 1 or device.type == "cpu":
        return
    there = torch.cuda.device_count() - (device.index or 0)
    if there < needed:
        asked = f"engine.tensor_parallel is {config.tensor_parallel}"
        if config.stages > 1:
            asked += f" and engine.stages {config.stages}"
        raise ConfigError(
            f"{asked} on {device}; this process sees {there} GPUs from there on, and each rank "
            f"of each stage needs one, {needed} in all"
        )


def log_memory(done: str, memory: KvMemory) -> None:
    """Logs the opened memory in one line; `done` is the first word of the line."""
    log.info(
        "%s %s on %s (%s): %d KV pages of %d tokens; %s",
        done,
        memory.folder.name,
        memory.device,
        memory.layout.dtype,
        memory.layout.num_pages,
        memory.layout.page_tokens,
        memory.backends,
    )


def _log_progress() -> Callable[[float], None]:
    """Logs the share of weights read, at most every two seconds."""
    last_s = time.monotonic()

    def progress(share: float) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= PROGRESS_EVERY_S:
            last_s = time.monotonic()
            log.info("loading weights: %d %%", round(100 * share))

    return progress


async def _end_link(link: WorkerLink, running: asyncio.Task[None]) -> None:
    """Closes the link after its queued reports are sent."""
    link.close()
    await asyncio.wait([running], timeout=LINK_CLOSE_S)


async def _drain(role: Role, link: WorkerLink, timeout_s: float) -> None:
    """Reports the drain, lets running requests finish, and drops the others at the deadline.

    Commands that cross this report are dropped: the end of the stream tells the scheduler so.
    """
    link.send(Draining())
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await role.wait_idle()
    link.refuse_commands()
    try:
        async with asyncio.timeout(DROP_TIMEOUT_S):
            await role.drop_all("the instance is shutting down")
    except TimeoutError:
        log.error("tasks and threads that the process still waits for:\n%s", stacks())
        raise MillraceError(
            f"requests still held memory {DROP_TIMEOUT_S:g} s after they were dropped"
        ) from None


def _registration(
    options: WorkerOptions, incarnation: Incarnation, role: str, instance: Instance, port: int
) -> Registration:
    memory = instance.memory
    return Registration(
        incarnation=incarnation,
        role=role,
        address=host_port(options.host, port),
        model_hash=memory.layout.model_hash,
        kv_pages=memory.layout.num_pages,
        page_tokens=memory.layout.page_tokens,
        max_context_tokens=memory.max_context_tokens,
        latency=instance.latency,
        node=options.node or platform.node(),
    )
