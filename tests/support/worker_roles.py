"""Prefill and decode roles in this process: real engine, transfers and gRPC, no scheduler.

A test plays the scheduler: it gives commands, and `messages` is what would have gone to it.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from contextlib import (
    AbstractContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from pathlib import Path
from typing import Any

import numpy as np

from millrace.core.config import Config, EngineConfig, SchedulerConfig, StoreConfig, TransferConfig
from millrace.core.incarnation import Incarnation
from millrace.core.request import Chunk
from millrace.core.request_spec import RequestSpec, SamplingParams
from millrace.core.scheduler.commands import AdmitDecode, Cancel, Member, Order, RunPrefill
from millrace.core.scheduler.effects import ChunkRef
from millrace.core.scheduler.reports import CachedBlocks, Registration, Report
from millrace.engine.assembly import Engine, open_engines
from millrace.engine.attention.ring import RingTask
from millrace.engine.forward.passes import Boundary
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.instance.role import Role, WorkerContext
from millrace.instance.stages.stages import open_staged_engine
from millrace.instance.transfer.transports import kv_transport, serve_member
from millrace.state.memory_store import MemoryStore
from millrace.telemetry.metrics import Registry
from millrace.telemetry.tracing.tracer import NO_TRACER, Tracer
from millrace.transfer.transport.base import Transport
from millrace.wire.codec.request_spec import encode_spec
from millrace.wire.server import bind, create_server
from support.deadlines import HANG_S, eventually
from support.memory_transport import MemoryHub, MemoryTransport
from support.tiny_models import model_folder

PROXY = Incarnation("proxy-0", 1)


def hub_for(*settings: Config) -> MemoryHub | None:
    """Returns the hub of roles with these settings; None where a member has a pool of its own."""
    return None if any(s.engine.kv_pools == "own" for s in settings) else MemoryHub()


def config(**engine: Any) -> Config:
    """Small and quick; `engine` are fields of its section."""
    settings: dict[str, Any] = {"dtype": "float32", "threads": 1, "kv_bytes": 8 << 20, **engine}
    return Config(
        engine=EngineConfig(device="cpu", **settings),
        # No proxy listens in most tests: none of them is gone before its request is done.
        scheduler=SchedulerConfig(heartbeat_s=0.1, lease_s=HANG_S),
        transfer=TransferConfig(handshake_timeout_s=600, transfer_timeout_s=600, lease_s=HANG_S),
        store=StoreConfig(journal_interval_ms=10),
    )


def _open(folder: Path, config: EngineConfig) -> Engine:
    if config.stages > 1:
        return open_staged_engine(str(folder), config, "127.0.0.1", transport=serve_member)
    (engine,) = open_engines(folder, config, 1, transport=serve_member)
    return engine


class LiveRole:
    """One role at work. `messages` holds what it told the scheduler, as (kind, report)."""

    def __init__(
        self,
        build: Callable[[WorkerContext], Role],
        settings: Config,
        *,
        name: str,
        hub: MemoryHub | None,
        store: MemoryStore,
        model: str = "llama",
        tracer: Tracer = NO_TRACER,
    ) -> None:
        """`hub`: of all roles of the test; None: they use NIXL, for KV in several processes."""
        self.incarnation = Incarnation(name, time.time_ns())
        self.messages: list[tuple[str, Any]] = []  # of requests
        self.cached: list[CachedBlocks] = []
        folder = model_folder(model)
        self.engine = _open(folder, settings.engine)
        address = f"{name}-{self.incarnation.generation}"
        self.transport: Transport
        if hub is None:
            self.transport = kv_transport(address, self.engine).transport
        else:
            self.transport = MemoryTransport(address, hub)
        self.registry = Registry()
        loop = asyncio.get_running_loop()
        self.role: Any = build(
            WorkerContext(
                config=settings,
                incarnation=self.incarnation,
                engine=self.engine,
                transport=self.transport,
                store=store,
                registry=self.registry,
                tracer=tracer,
                send=self.take,
                send_threadsafe=lambda m: loop.call_soon_threadsafe(self.take, m),
            )
        )
        self.server = create_server()
        self.role.attach(self.server)
        self.address = f"127.0.0.1:{bind(self.server, '127.0.0.1', 0)}"
        self._running: asyncio.Task[None] | None = None

    @property
    def member(self) -> Member:
        return Member(incarnation=self.incarnation, address=self.address)

    def take(self, report: Report) -> None:
        """Plays the scheduler's end of the stream."""
        if isinstance(report, CachedBlocks):
            self.cached.append(report)
        else:
            self.messages.append((kind_of(report), report))

    def kinds(self, request_id: str) -> list[str]:
        """What was said of a request, in order."""
        return [kind for kind, message in self.messages if message.request_id == request_id]

    async def said(self, kind: str, request_id: str, timeout_s: float = HANG_S) -> Any:
        """The first message of this kind about a request."""

        def found() -> list[Any]:
            return [m for k, m in self.messages if k == kind and m.request_id == request_id]

        await eventually(found, timeout_s)
        return found()[0]

    def has_shaken_hands(self, request_id: str) -> bool:
        """Of a prefill role: the receiver has granted this request's transfer."""
        session = self.role.sending(request_id)
        return session is not None and session.timings.granted_s > 0

    def held_before_the_last_chunk(self, of: str = "") -> AbstractContextManager[None]:
        """Of a prefill role: holds passes that are to give logits, of one request or of all."""
        return self.held(lambda task: task.want_logits and of in ("", task.name))

    @contextmanager
    def held(self, which: Callable[[Any], bool]) -> Iterator[None]:
        """Of a prefill role: passes with such a task stay at their first boundary, and are
        suspended and cancelled there like any other. A group's pass, whose boundaries count, takes
        a second to each instead.
        """
        runner, go_on = self.engine.runner, threading.Event()
        prefill, prefill_ring = runner.prefill_batch, runner.prefill_ring

        def held(tasks: Sequence[PrefillTask]) -> Generator[Boundary]:
            for boundary in prefill(tasks):
                yield boundary
                while any(map(which, tasks)) and not go_on.wait(0.002):
                    yield boundary

        def held_ring(task: RingTask) -> Generator[Boundary]:
            for boundary in prefill_ring(task):
                if which(task):
                    go_on.wait(1)
                yield boundary

        runner.prefill_batch = held  # type: ignore[method-assign]
        runner.prefill_ring = held_ring  # type: ignore[method-assign]
        try:
            yield
        finally:
            runner.prefill_batch = prefill  # type: ignore[method-assign]
            runner.prefill_ring = prefill_ring  # type: ignore[method-assign]
            go_on.set()

    def cancel(self, request_id: str) -> None:
        self.role.on_command(Cancel(request_id=request_id, reason="the test wants it"))

    async def start(self) -> None:
        await self.server.start()
        self._running = asyncio.create_task(self.role.run())

    async def ended(self) -> None:
        """Returns when the role has ended by itself; raises what ended it."""
        assert self._running is not None
        await asyncio.shield(self._running)

    async def stop(self) -> None:
        """Ends the role as its host does; what has failed in it, or leaked, is raised."""
        assert self._running is not None
        try:
            if self._running.done():
                self._running.result()
            async with asyncio.timeout(HANG_S):
                await self.role.drop_all("the test is over")
            self.role.check_integrity()
        finally:
            await self.close()

    async def close(self) -> None:
        """Ends the role as it is."""
        assert self._running is not None
        self._running.cancel()
        await asyncio.gather(self._running, return_exceptions=True)
        await self.server.stop(grace=None)
        await self.role.close()
        self.transport.close()
        await asyncio.to_thread(self.engine.close)


@asynccontextmanager
async def live_roles(*roles: LiveRole) -> AsyncIterator[None]:
    """Starts all; at the end stops them, in order."""
    async with AsyncExitStack() as stack:
        for role in reversed(roles):
            await role.start()
            stack.push_async_callback(role.stop)
        yield


def registration(live: LiveRole) -> Registration:
    """What a role registers as."""
    base = Registration(
        incarnation=live.incarnation,
        role=live.role.name,
        address=live.address,
        model_hash="m",
        kv_pages=live.engine.pool.num_pages,
        page_tokens=live.engine.layout.page_tokens,
        max_context_tokens=live.engine.max_context_tokens,
    )
    registered: Registration = live.role.complete_registration(base)
    return registered


def kind_of(report: Report) -> str:
    """The report's type as a field is named: chunk_started, ..."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", type(report).__name__).lower()


def spec(request_id: str, prompt_tokens: int, *, pooling: str = "", **sampling: Any) -> RequestSpec:
    """A greedy request of proxy-0's unless `sampling` says otherwise."""
    return RequestSpec(
        request_id=request_id,
        proxy=PROXY,
        prompt_tokens=prompt_tokens,
        sampling=SamplingParams(**{"max_tokens": 8, **sampling}),
        arrival_unix_s=time.time(),
        pooling=pooling,
    )


async def remember(store: MemoryStore, request: RequestSpec, ids: list[int]) -> None:
    """Does the proxy's part: the prompt lies in the store."""
    await store.create(
        request.request_id, spec=encode_spec(request), prompt_ids=np.array(ids, dtype=np.int32)
    )


def run_prefill(
    request: RequestSpec, decode: Member | None, *, start_token: int = 0, **more: Any
) -> RunPrefill:
    """The prompt from `start_token` on as one chunk."""
    chunk = Chunk(
        index=0,
        start_token=start_token,
        num_tokens=request.prompt_tokens - start_token,
        instance_ids=(),
    )
    return RunPrefill(request=request, chunks=(chunk,), decode=decode, **more)


def order(*request_ids: str) -> Order:
    """These requests, of a chunk each, are to go in this order."""
    return batches(*((request_id,) for request_id in request_ids))


def batches(*entries: tuple[str, ...]) -> Order:
    """These batches of prompts, of a chunk each, are to go in this order."""
    queue = (tuple(ChunkRef(request_id=name, chunk_index=0) for name in one) for one in entries)
    return Order(queue=tuple(queue))


def admit_decode(request: RequestSpec, **more: Any) -> AdmitDecode:
    return AdmitDecode(request=request, **more)
