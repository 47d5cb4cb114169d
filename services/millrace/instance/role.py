"""What a role is: the part of an instance that differs between prefill, decode, mixed and kvp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Protocol

import grpc

from millrace.core.config import Config
from millrace.core.cost.decode_step import DecodeStepTime
from millrace.core.cost.latency import SpLatency
from millrace.core.incarnation import Incarnation
from millrace.core.scheduler.commands import Command
from millrace.core.scheduler.reports import CachedBlocks, Heartbeat, Registration, Report
from millrace.engine.assembly import Engine, KvMemory
from millrace.engine.kv.page_table import PageTable
from millrace.instance.vitals import Vitals
from millrace.state.store import RequestStore
from millrace.telemetry.metrics import Registry
from millrace.telemetry.tracing.tracer import NO_TRACER, Tracer
from millrace.transfer.transport.base import Transport


@dataclass(frozen=True, slots=True, kw_only=True)
class HostContext:
    """The context of any role. `send`: for the event loop; `send_threadsafe`: for other threads."""

    config: Config
    incarnation: Incarnation
    transport: Transport
    store: RequestStore
    registry: Registry
    tracer: Tracer = NO_TRACER
    on_corrupt: Callable[[str], None] = lambda sender: None  # KV that was not as it was sent
    send: Callable[[Report], None]
    send_threadsafe: Callable[[Report], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerContext(HostContext):
    """The context of a role that runs the model."""

    engine: Engine
    decode_step: DecodeStepTime | None = None  # of its batches; None: unknown
    decode_table: PageTable | None = None  # of its batch, if the runner follows one already

    @staticmethod
    def of(
        host: HostContext,
        engine: Engine,
        decode_step: DecodeStepTime | None = None,
        decode_table: PageTable | None = None,
    ) -> WorkerContext:
        shared = {field.name: getattr(host, field.name) for field in fields(HostContext)}
        return WorkerContext(
            engine=engine, decode_step=decode_step, decode_table=decode_table, **shared
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """The loaded engine and the latency models of what it does, before the instance serves.
    `decode_table`: as of `latency.decode_table`."""

    role: str
    engine: Engine
    vitals: Vitals
    latency: SpLatency | None = None
    decode_step: DecodeStepTime | None = None
    decode_table: PageTable | None = None


class Role(Protocol):
    """The part of a worker that depends on its role."""

    name: str

    @property
    def kv_region(self) -> int:
        """The transport's number of the KV pool's region."""

    def attach(self, server: grpc.aio.Server) -> None:
        """Adds the role's gRPC services."""

    def on_command(self, command: Command) -> None:
        """Takes one command of the scheduler; returns at once."""

    def counts(self) -> tuple[int, int]:
        """Counts the requests in compute or in the batch, and the waiting requests."""

    def heartbeat(self) -> Heartbeat:
        """Builds the next heartbeat. It may cover the time since the last one, so each is sent."""

    def cached_blocks(self) -> CachedBlocks | None:
        """Builds the report of the prefix cache's changes since the last; None: there are none."""

    def complete_registration(self, base: Registration) -> Registration:
        """Adds the role's fields. The next `cached_blocks` is the whole prefix cache."""

    async def run(self) -> None:
        """Works until cancelled."""

    async def drop_all(self, reason: str) -> None:
        """Drops every request; returns when none holds anything."""

    async def wait_idle(self) -> None:
        """Returns when no request holds anything at this instance."""

    def check_integrity(self) -> None:
        """Raises IntegrityError when the idle instance holds state of a request."""

    async def close(self) -> None:
        """Stops all work, finished or not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    """A worker of any role, before it serves. `latency`: its prefill times, if it has a model."""

    role: str
    memory: KvMemory
    vitals: Vitals
    build: Callable[[HostContext], Role]
    latency: SpLatency | None = None
