"""Live prefill groups that compute prompts as their caller plans them.

N prefill instances and a decode instance, each a process as `millrace up` starts it, whose
scheduler and proxy is this one: it sends the commands of a plan and takes what comes of them.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np
import numpy.typing as npt

from millrace.core.config import SchedulerConfig, StoreConfig
from millrace.core.errors import MillraceError
from millrace.core.request import Chunk
from millrace.core.scheduler import effects
from millrace.core.scheduler.planning.plan import PlannedChunk
from millrace.local.private_redis import PrivateRedis
from millrace.local.service import Service, all_or_first_error
from millrace.profiler.costs import Costs, read_costs
from millrace.profiler.group_run import Run, Underway
from millrace.state.open import open_store
from millrace.state.store import RequestStore
from millrace.wire.channel import open_channel
from millrace.wire.codec import scheduler as codec
from millrace.wire.pb import common_pb2, decode_pb2, decode_pb2_grpc, scheduler_pb2
from millrace.wire.server import bind, create_server

HOST = "127.0.0.1"
DECODE = "decode-0"
PROXY = common_pb2.Incarnation(id="conductor", generation=1)
#: One token is prefill's, the next shows that decode has all K/V.
OUTPUT_TOKENS = 2
#: For instances to drop a prompt that has failed.
GIVE_UP_S = 10.0

WorkerContext = grpc.aio.ServicerContext[
    AsyncIterator[scheduler_pb2.WorkerMessage], AsyncIterator[scheduler_pb2.WorkerCommand]
]
StatusContext = grpc.aio.ServicerContext[
    scheduler_pb2.StatusRequest, Awaitable[scheduler_pb2.StatusReply]
]


class ConductorError(MillraceError):
    """An instance failed, died or did not end in time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetOptions:
    """`settings` (`section.field=value`) go to every instance. `visible` names the devices of each
    instance, prefill first and decode last, where they are not to share all there are
    (CUDA_VISIBLE_DEVICES).
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
    """A registered life."""

    register: scheduler_pb2.Register
    outbox: asyncio.Queue[scheduler_pb2.WorkerCommand] = field(default_factory=asyncio.Queue)
    sequence: int = 0

    def send(self, command: scheduler_pb2.WorkerCommand) -> None:
        self.sequence += 1
        command.sequence = self.sequence
        self.outbox.put_nowait(command)


class Conductor:
    """async with Conductor(options) as conductor: run = await conductor.run(plan)

    Members of a plan are numbers of prefill instances, 0 to N - 1. One prompt at a time.
    """

    def __init__(
        self, options: FleetOptions, told: Callable[[str], None] = lambda what: None
    ) -> None:
        self.options = options
        self._told = told
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
        await self._stop_services()  # while they have their scheduler
        await self._stack.aclose()
        if self._unclean and raised[0] is None:
            raise ConductorError("; ".join(self._unclean))

    @property
    def prefill_ids(self) -> tuple[str, ...]:
        return tuple(f"prefill-{number}" for number in range(self.options.prefill))

    @property
    def register(self) -> scheduler_pb2.Register:
        """What the first prefill instance said of itself."""
        return self._instances[self.prefill_ids[0]].register

    async def run(
        self, plan: Sequence[PlannedChunk], prompt_ids: npt.NDArray[np.int32] | None = None
    ) -> Run:
        """Computes a prompt as planned, and returns once all instances have let go of it.

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
                await asyncio.wait_for(request.over(), self.options.run_timeout_s)
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
        """Of every prefill instance, since its start."""
        return list(await asyncio.gather(*(self._costs(name) for name in self.prefill_ids)))

    # -- a prompt

    async def _submit(
        self, tokens: int, prompt_ids: npt.NDArray[np.int32] | None
    ) -> common_pb2.RequestSpec:
        self._runs += 1
        spec = common_pb2.RequestSpec(
            request_id=f"run-{self._runs}",
            proxy=PROXY,
            prompt_tokens=tokens,
            sampling=common_pb2.SamplingParams(
                max_tokens=OUTPUT_TOKENS,
                top_p=1.0,
                repetition_penalty=1.0,
                n=1,
                logprobs=-1,
                prompt_logprobs=-1,
            ),
            arrival_unix_s=time.time(),
        )
        ids = np.zeros(tokens, dtype=np.int32) if prompt_ids is None else prompt_ids
        await self._store.create(spec.request_id, spec=spec.SerializeToString(), prompt_ids=ids)
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

    def _command(self, spec: common_pb2.RequestSpec, chunks: tuple[Chunk, ...]) -> None:
        """As the scheduler does: decode first, then every member."""
        request_id, decode = spec.request_id, self._instances[DECODE]
        admit = effects.AdmitDecode(instance_id=DECODE, request_id=request_id)
        decode.send(codec.admit_decode(admit, spec))
        members = [self._instances[name] for name in chunks[-1].instance_ids]
        group = [codec.member(one.register) for one in members]
        for one in members:
            effect = effects.RunPrefill(
                instance_id=one.register.incarnation.id,
                request_id=request_id,
                chunks=chunks,
                decode_id=DECODE,
            )
            one.send(codec.run_prefill(effect, spec, codec.member(decode.register), group))

    async def _give_up(self, request: Underway, members: Sequence[str]) -> None:
        """Has all drop it, so that the next prompt finds nothing of it. Raises ConductorError."""
        reason = request.failure or (
            f"{', '.join(sorted(request.holding)) or 'decode'} did not end a prompt within "
            f"{self.options.run_timeout_s:g} s"
        )
        effect = effects.CancelOn(instance_id="", request_id=request.request_id, reason=reason)
        for name in request.holding:
            self._instances[name].send(codec.cancel(effect))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(request.forgotten(set(members)), GIVE_UP_S)
        raise ConductorError(reason)

    async def _costs(self, name: str) -> Costs:
        url = f"http://{HOST}:{self._metrics_ports[name]}/metrics"
        return await asyncio.to_thread(read_costs, url)

    # -- the scheduler's end

    def _handlers(
        self,
    ) -> grpc.GenericRpcHandler[scheduler_pb2.WorkerMessage, scheduler_pb2.WorkerCommand]:
        """What workers call of `Scheduler`: its stream, and its status to find peers to probe."""
        connect = grpc.stream_stream_rpc_method_handler(
            self._connect,
            request_deserializer=scheduler_pb2.WorkerMessage.FromString,
            response_serializer=scheduler_pb2.WorkerCommand.SerializeToString,
        )
        status = grpc.unary_unary_rpc_method_handler(
            self._status,
            request_deserializer=scheduler_pb2.StatusRequest.FromString,
            response_serializer=scheduler_pb2.StatusReply.SerializeToString,
        )
        return grpc.method_handlers_generic_handler(
            "millrace.v1.Scheduler", {"ConnectWorker": connect, "GetStatus": status}
        )

    async def _status(
        self, request: scheduler_pb2.StatusRequest, context: StatusContext
    ) -> scheduler_pb2.StatusReply:
        """No instance to probe: the first passes show whether they reach each other."""
        return scheduler_pb2.StatusReply()

    async def _connect(
        self,
        request_iterator: AsyncIterator[scheduler_pb2.WorkerMessage],
        context: WorkerContext,
    ) -> AsyncIterator[scheduler_pb2.WorkerCommand]:
        first = await anext(request_iterator)
        name = first.register.incarnation.id
        instance = self._instances[name] = _Instance(first.register)
        instance.send(codec.registered(SchedulerConfig(preemption="none")))
        reading = asyncio.create_task(self._read(name, request_iterator))
        try:
            while True:
                yield await instance.outbox.get()
        finally:
            reading.cancel()

    async def _read(self, name: str, messages: AsyncIterator[scheduler_pb2.WorkerMessage]) -> None:
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.CancelledError):
            async for message in messages:
                if self._request is not None:
                    kind = message.WhichOneof("kind")
                    about = getattr(getattr(message, kind or ""), "request_id", "")
                    if about == self._request.request_id:
                        self._request.hear(name, message)
        if self._request is not None:
            self._request.fail(f"{name} is gone: {self._services[name].last_words()}")
            self._request.lets_go(name)

    # -- processes

    async def _start(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="millrace-"))
        self._stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
        redis = PrivateRedis()
        self._stack.push_async_callback(redis.stop)
        url = await redis.start(self._directory)
        self._store = open_store(StoreConfig(url=url))
        self._stack.push_async_callback(self._store.close)
        port, *metrics_ports = _free_ports(1 + self.options.prefill)
        self._metrics_ports = dict(zip(self.prefill_ids, metrics_ports, strict=True))
        names = [*self.prefill_ids, DECODE]
        self._told(f"starting {len(names)} instances")
        self._stack.push_async_callback(self._stop_services)
        for number, name in enumerate(names):
            service = self._service(name, number, f"{HOST}:{port}", url)
            self._services[name] = service
            await service.launch()  # before there is a server: gRPC does not like forks
        server = create_server()
        server.add_generic_rpc_handlers((self._handlers(),))
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
        """What decode sends to the proxy; it gives the requests of one that is not there up."""
        decode = self._instances[DECODE].register
        subscription = decode_pb2.TokenSubscription(proxy=PROXY, decode=decode.incarnation)
        async with open_channel(decode.address) as channel:
            with contextlib.suppress(grpc.aio.AioRpcError):
                async for batch in decode_pb2_grpc.DecodeStub(channel).StreamTokens(subscription):
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
            f"{one.name} did not end well: {one.last_words()}"
            for one in self._services.values()
            if not one.ended_well
        ]


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now, each another."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]
