"""Runs live prefill groups that compute prompts as their caller plans them.

N prefill instances and a decode instance run as processes that `millrace up` would start. This
process is their scheduler and proxy: it sends the commands of a plan and takes reports and tokens.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from millrace.concurrency import all_or_first_error
from millrace.core.config import SchedulerConfig, StoreConfig
from millrace.core.errors import MillraceError
from millrace.core.incarnation import Incarnation
from millrace.core.request import Chunk
from millrace.core.request_spec import RequestSpec, SamplingParams
from millrace.core.scheduler.commands import (
    AdmitDecode,
    Cancel,
    Command,
    Member,
    Registered,
    RunPrefill,
)
from millrace.core.scheduler.planning.plan import PlannedChunk
from millrace.core.scheduler.reports import InstanceReport, Registration, Report
from millrace.home import temporary_folder
from millrace.local.private_redis import PrivateRedis
from millrace.local.processes.service import Service
from millrace.profiler.costs import Costs, read_costs
from millrace.profiler.groups.run import Run, Underway
from millrace.profiler.groups.servicer import ConductorServicer
from millrace.state.open import open_store
from millrace.state.store import RequestStore
from millrace.wire.clients.token_stream import TokenStreamError, token_events
from millrace.wire.codec.request_spec import encode_spec
from millrace.wire.server import bind, create_server

HOST = "127.0.0.1"
DECODE = "decode-0"
PROXY = Incarnation("conductor", 1)
#: Prefill samples the first token; decode's next token shows that it has all K/V.
OUTPUT_TOKENS = 2
#: Time for instances to drop a failed prompt.
GIVE_UP_S = 10.0


class ConductorError(MillraceError):
    """Raised when an instance fails, dies or does not end in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """The options of a fleet. `settings` (`section.field=value`) go to every instance. `visible`
    names the devices of each instance (CUDA_VISIBLE_DEVICES), prefill first and decode last; empty:
    all instances share all devices.
    """

    model: str
    prefill: int
    settings: Sequence[str] = ()
    config: Path | None = None
    visible: Sequence[str] = ()
    start_timeout_s: float = 600.0
    run_timeout_s: float = 600.0


@dataclass(slots=True, eq=False)
class _Instance:
    """A registered incarnation of an instance."""

    registration: Registration
    outbox: asyncio.Queue[Command] = field(default_factory=asyncio.Queue)

    @property
    def member(self) -> Member:
        return Member(incarnation=self.registration.incarnation, address=self.registration.address)

    def send(self, command: Command) -> None:
        self.outbox.put_nowait(command)


class Conductor:
    """Starts a fleet and computes prompts on it.

    async with Conductor(options) as conductor: run = await conductor.run(plan)

    Members of a plan are numbers of prefill instances, 0 to N - 1. One prompt at a time.
    """

    def __init__(
        self, options: FleetOptions, announce: Callable[[str], None] = lambda what: None
    ) -> None:
        self.options = options
        self._announce = announce
        self._directory = Path()
        self._stack = contextlib.AsyncExitStack()
        self._services: dict[str, Service] = {}
        self._metrics_ports: dict[str, int] = {}
        self._instances: dict[str, _Instance] = {}
        self._store: RequestStore
        self._request: Underway | None = None
        self._runs = 0
        self._unclean: list[str] = []

    async def __aenter__(self) -> Conductor:
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self._stop_services()  # while their scheduler still runs
        await self._stack.aclose()
        if self._unclean and raised[0] is None:
            raise ConductorError("; ".join(self._unclean))

    @property
    def prefill_ids(self) -> tuple[str, ...]:
        return tuple(f"prefill-{number}" for number in range(self.options.prefill))

    @property
    def registration(self) -> Registration:
        """The registration of the first prefill instance."""
        return self._instances[self.prefill_ids[0]].registration

    async def run(
        self, plan: Sequence[PlannedChunk], prompt_ids: npt.NDArray[np.int32] | None = None
    ) -> Run:
        """Computes a prompt as planned; returns when all instances have released it.

        prompt_ids: int32 [tokens]; zeros if not given. Raises ConductorError.
        """
        spec = await self._submit(sum(chunk.num_tokens for chunk in plan), prompt_ids)
        chunks = self._chunks(plan)
        members = chunks[-1].instance_ids
        request = Underway(spec.request_id, {*members, DECODE}, time.monotonic())
        self._request = request
        try:
            self._command(spec, chunks)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self.options.run_timeout_s):
                    await request.over()
            if not request.is_over:
                await self._give_up(request, members)
        finally:
            self._request = None
            await self._store.delete(spec.request_id)
        return Run(
            chunks=tuple(request.chunks),
            started_s=request.started_s,
            ttft_s=request.ttft_s,
            landed_s=request.landed_s,
        )

    async def costs(self) -> list[Costs]:
        """Reads the costs of every prefill instance since its start."""
        return list(await asyncio.gather(*(self._costs(name) for name in self.prefill_ids)))

    # -- a prompt

    async def _submit(self, tokens: int, prompt_ids: npt.NDArray[np.int32] | None) -> RequestSpec:
        self._runs += 1
        spec = RequestSpec(
            request_id=f"run-{self._runs}",
            proxy=PROXY,
            prompt_tokens=tokens,
            sampling=SamplingParams(max_tokens=OUTPUT_TOKENS),
            arrival_unix_s=time.time(),
        )
        ids = np.zeros(tokens, dtype=np.int32) if prompt_ids is None else prompt_ids
        await self._store.create(spec.request_id, spec=encode_spec(spec), prompt_ids=ids)
        return spec

    def _chunks(self, plan: Sequence[PlannedChunk]) -> tuple[Chunk, ...]:
        chunks, start = [], 0
        for index, (tokens, members) in enumerate(plan):
            ids = tuple(self.prefill_ids[number] for number in members)
            chunks.append(
                Chunk(index=index, start_token=start, num_tokens=tokens, instance_ids=ids)
            )
            start += tokens
        return tuple(chunks)

    def _command(self, spec: RequestSpec, chunks: tuple[Chunk, ...]) -> None:
        """Sends the commands as the scheduler does: decode first, then every member."""
        decode = self._instances[DECODE]
        decode.send(AdmitDecode(request=spec))
        members = [self._instances[name] for name in chunks[-1].instance_ids]
        run = RunPrefill(
            request=spec,
            chunks=chunks,
            decode=decode.member,
            group=tuple(one.member for one in members),
        )
        for one in members:
            one.send(run)

    async def _give_up(self, request: Underway, members: Sequence[str]) -> None:
        """Makes all instances drop the prompt before the next one. Raises ConductorError."""
        reason = request.failure or (
            f"{', '.join(sorted(request.holding)) or 'decode'} did not end a prompt within "
            f"{self.options.run_timeout_s:g} s"
        )
        cancel = Cancel(request_id=request.request_id, reason=reason)
        for name in request.holding:
            self._instances[name].send(cancel)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(GIVE_UP_S):
                await request.forgotten(set(members))
        raise ConductorError(request.failure or reason)  # a loss may be known by now

    async def _costs(self, name: str) -> Costs:
        url = f"http://{HOST}:{self._metrics_ports[name]}/metrics"
        return await asyncio.to_thread(read_costs, url)

    # -- the scheduler's end

    def joined(self, registration: Registration) -> asyncio.Queue[Command]:
        """Notes a registered instance; returns the queue of its commands."""
        instance = _Instance(registration)
        self._instances[registration.incarnation.id] = instance
        config = SchedulerConfig(preemption="none")
        instance.send(
            Registered(
                heartbeat_s=config.heartbeat_s,
                preemption=config.preemption,
                policy=config.policy,
            )
        )
        return instance.outbox

    def hear(self, instance_id: str, report: Report) -> None:
        """Takes an instance's report on the prompt in flight."""
        if self._request is None or isinstance(report, InstanceReport):
            return
        if report.request_id == self._request.request_id:
            self._request.hear(instance_id, report)

    def left(self, instance_id: str) -> None:
        """Fails the prompt in flight, because an instance's stream has ended."""
        if self._request is not None:
            why = self._services[instance_id].ending()
            self._request.lost(f"{instance_id} is gone: {why}")
            self._request.lets_go(instance_id)

    # -- processes

    async def _start(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="millrace-", dir=temporary_folder()))
        self._stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
        redis = PrivateRedis()
        self._stack.push_async_callback(redis.stop)
        url = await redis.start(self._directory)
        self._store = open_store(StoreConfig(url=url))
        self._stack.push_async_callback(self._store.close)
        port, *metrics_ports = _free_ports(1 + self.options.prefill)
        self._metrics_ports = dict(zip(self.prefill_ids, metrics_ports, strict=True))
        names = [*self.prefill_ids, DECODE]
        self._announce(f"starting {len(names)} instances")
        self._stack.push_async_callback(self._stop_services)
        for number, name in enumerate(names):
            service = self._service(name, number, f"{HOST}:{port}", url)
            self._services[name] = service
            await service.launch()  # before the server: gRPC can't handle forks
        server = create_server()
        ConductorServicer(self).add_to(server)
        bind(server, HOST, port)
        await server.start()
        self._stack.push_async_callback(server.stop, None)
        await all_or_first_error(
            service.wait_until_it_serves(self.options.start_timeout_s)
            for service in self._services.values()
        )
        tokens = asyncio.create_task(self._take_tokens())
        self._stack.callback(tokens.cancel)

    async def _take_tokens(self) -> None:
        """Takes decode's tokens as the proxy; decode would end the requests of an absent proxy."""
        decode = self._instances[DECODE].member
        stream = token_events(decode.address, proxy=PROXY, decode=decode.incarnation)
        with contextlib.suppress(TokenStreamError):
            async for batch in stream:
                for event in batch.events:
                    request = self._request
                    if request is not None and event.request_id == request.request_id:
                        request.token()

    def _service(self, name: str, number: int, scheduler: str, store_url: str) -> Service:
        o = self.options
        settings = [f"store.url={store_url}", *o.settings]
        if name in self._metrics_ports:
            settings.append(f"telemetry.metrics_port={self._metrics_ports[name]}")
        arguments = [name.partition("-")[0], "--model", o.model, "--id", name]
        arguments += ["--scheduler", scheduler]
        arguments += [] if o.config is None else ["--config", str(o.config)]
        for setting in settings:
            arguments += ["--set", setting]
        environment = {"CUDA_VISIBLE_DEVICES": o.visible[number]} if o.visible else {}
        return Service(name, arguments, self._directory / f"{name}.log", environment)

    async def _stop_services(self) -> None:
        await asyncio.gather(*(service.stop() for service in self._services.values()))
        self._unclean = [
            f"{one.name} did not end well: {one.last_output()}"
            for one in self._services.values()
            if not one.ended_well
        ]


def _free_ports(count: int) -> list[int]:
    """Returns `count` different ports that no process listens on now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]
