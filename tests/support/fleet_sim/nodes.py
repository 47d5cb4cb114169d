"""The schedulers and the proxies of the simulation: the real services, without HTTP and gRPC."""

from __future__ import annotations

import asyncio
import time

from millrace.core.config import Config
from millrace.core.incarnation import Incarnation
from millrace.core.request_spec import RequestSpec, SamplingParams
from millrace.proxy.errors import ApiError
from millrace.proxy.fleet.gateway import Gateway
from millrace.proxy.generation.choice import Choice
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.request.options import Options
from millrace.scheduler.leadership import Leadership
from millrace.scheduler.loop import SchedulerLoop
from millrace.scheduler.recorder import Recorder
from millrace.scheduler.servicer import SchedulerServicer
from millrace.scheduler.succession import Estate
from millrace.state.leader import LeaderWatch
from support.fleet_sim.network import Network
from support.fleet_sim.processes import NOTHING, Process, VirtualLoop
from support.fleet_sim.store import Store, StoreLink
from support.fleet_sim.streams import ASKS_AGAIN_S, ProxyStreams
from support.fleet_sim.tokens import blocks_of, number_of, prompt_of, slo_of, token_of

SCHEDULERS = "s0:1,s1:1"

CHECKED_STEPS = 4  # of a machine, every fourth: a check takes as long as a step


class SchedulerNode:
    """A scheduler that stands by, leads when the lease is free, and ends when it has lost it."""

    def __init__(
        self, name: str, loop: VirtualLoop, network: Network, store: Store, config: Config
    ) -> None:
        self.name = name
        self.process = Process(name, loop)
        self.leading: SchedulerLoop | None = None
        self._steps = 0
        self._config = config
        self._records = StoreLink(store, "records", self.process)
        self._leadership = Leadership(
            StoreLink(store, "leases", self.process), f"{name}:1", config.scheduler, loop.time
        )
        self._servicer = SchedulerServicer(lambda: self._leadership.leader, self._leadership.outrun)
        methods = {
            "ConnectWorker": self._servicer.ConnectWorker,
            "ConnectProxy": self._servicer.ConnectProxy,
        }
        network.listen(f"{name}:1", self.process, methods)
        self.process.spawn(self._run(loop))

    @property
    def epoch(self) -> int:
        """0: it stands by."""
        return 0 if self.leading is None else self.leading.epoch

    async def _run(self, clock: VirtualLoop) -> None:
        lease = await self._leadership.lead()
        recorder = Recorder(self._records, may_write=self._leadership.certain)
        loop = SchedulerLoop(
            self._config.scheduler,
            recorder,
            NOTHING,
            clock.time,
            epoch=lease.epoch,
            estate=Estate.decode(lease.note, ""),
        )
        loop.watching = [self._check]
        self.leading = loop
        self._servicer.lead(loop)
        kept = self._leadership.keep(loop.note, loop.note_changed)
        await asyncio.gather(loop.run(), loop.tick(), recorder.run(), kept, loop.end_takeover())

    def _check(self, *step: object) -> None:
        self._steps += 1
        if self._steps % CHECKED_STEPS == 0:
            assert self.leading is not None
            self.leading.machine.check_integrity()


class Client:
    """A request of a client: what it got. Also the sink of its request, and its detokenizer."""

    def __init__(self, name: str, proxy: str, prompt_tokens: int, max_tokens: int) -> None:
        self.name = name
        self.proxy = proxy
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self.tokens: list[int] = []
        self.error: ApiError | None = None
        self.done = False
        self.gone = False  # it left, or its proxy died
        self.refused: ApiError | None = None  # the last refusal
        self.asks_at_s: float | None = None  # it was refused, and asks again by its id
        self.wrong = ""  # what broke the promise; a proxy survives an error of one request

    @property
    def is_over(self) -> bool:
        return self.done or self.gone or self.error is not None

    def feed(self, token_ids) -> str:
        for token_id in token_ids:
            position = len(self.tokens)
            if position == self.max_tokens:
                self.wrong = f"{self.name} gets a token after its last"
            elif token_id != token_of(self.name, position):
                self.wrong = f"{self.name}: token {position} is another one"
            self.tokens.append(token_id)
        return ""

    def flush(self) -> str:
        return ""

    def on_text(self, choice: Choice, text: str) -> None:
        pass

    def on_done(self, request: ProxyRequest) -> None:
        if self.is_over or len(self.tokens) != self.max_tokens:
            self.wrong = self.wrong or f"{self.name} ends after {len(self.tokens)} tokens, or twice"
        self.done = True

    def on_error(self, error: ApiError) -> None:
        if self.is_over or self.asks_at_s is not None:
            self.wrong = self.wrong or f"{self.name} ends twice: {error}"
        if self.tokens or not (error.is_refusal or error.status == 409):
            self.error = error
            return
        self.refused, self.asks_at_s = error, time.monotonic() + ASKS_AGAIN_S
        if error.is_refusal and error.retry_after_s is None:
            self.wrong = f"{self.name}: a refusal without Retry-After: {error.message}"


class ProxyNode:
    """A proxy: its gateway, and the clients that it serves."""

    def __init__(
        self,
        name: str,
        generation: int,
        loop: VirtualLoop,
        store: Store,
        config: Config,
    ) -> None:
        self.name = name
        self.process = Process(name, loop)
        self.incarnation = Incarnation(name, generation)
        self.requests: dict[str, ProxyRequest] = {}
        self._loop = loop
        self._engine, self._slo = config.engine, slo_of(config)
        leases = StoreLink(store, "leases", self.process)
        self.gateway: Gateway = self.process.call(
            lambda: Gateway(
                incarnation=self.incarnation,
                leaders=LeaderWatch(leases, SCHEDULERS),
                store=StoreLink(store, "records", self.process),
                config=config.proxy,
                request_timeout_s=config.scheduler.request_timeout_s,
                metrics=NOTHING,
            )
        )
        self.streams: ProxyStreams = self.process.call(
            ProxyStreams, self.gateway, loop, store, self.process, config
        )
        self.process.call(self.gateway.start)

    def submit(self, client: Client) -> None:
        client.asks_at_s = None
        ids = prompt_of(client.name, client.prompt_tokens)
        blocks = blocks_of(client.name, ids, self._engine)
        spec = RequestSpec(
            request_id=client.name,
            proxy=self.incarnation,
            prompt_tokens=client.prompt_tokens,
            sampling=SamplingParams(max_tokens=client.max_tokens, seed=number_of(client.name)),
            arrival_unix_s=self._loop.unix_s(),
            slo=self._slo,
            prefix_hashes=tuple(blocks.hashes),
            prefix_block_tokens=blocks.block_tokens,
            prefix_root=blocks.root,
        )
        options = Options(spec.sampling)
        request = ProxyRequest(
            spec=spec,
            prompt_ids=ids,
            sink=client,
            choices=[Choice(0, client, options)],
            slo=spec.slo,
            detailed=False,
            echo=None,
            arrived_at=self._loop.now_s,
        )
        self.requests[client.name] = request
        self.process.spawn(self._serve(request, client))

    async def _serve(self, request: ProxyRequest, client: Client) -> None:
        try:
            self.gateway.admit(1)
            await self.gateway.submit(request)
        except ApiError as error:
            if not client.is_over and not self.process.has_lost:
                client.on_error(error)
            self.gateway.leave(request, "refused")

    def leave(self, client: Client) -> None:
        """The client closes its connection."""
        client.gone = True
        self.process.call(self.gateway.leave, self.requests[client.name], "the client left")
