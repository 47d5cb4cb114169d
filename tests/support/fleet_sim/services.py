"""The instances of the simulation that run the real services, over memory, a transport and a model
that stand in: prefill instances alone and in groups, decode instances, KVP workers.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from millrace.core.config import Config
from millrace.core.cost.latency import SpLatency
from millrace.core.errors import IntegrityError
from millrace.core.incarnation import Incarnation
from millrace.core.request_spec import finish_reason
from millrace.core.scheduler import commands, reports
from millrace.decode.admissions import Admissions
from millrace.decode.metrics import DecodeMetrics
from millrace.decode.output.output import Output
from millrace.decode.request import DecodeEvent, DecodeRequest, DecodeState
from millrace.decode.request_table import RequestTable
from millrace.decode.role import TokenRole
from millrace.engine.decode_batch import TokenOut
from millrace.instance.link import WorkerLink
from millrace.instance.role import WorkerContext
from millrace.instance.shards.shard_table import ShardTable
from millrace.instance.tasks import Tasks
from millrace.instance.transfer.transports import transport_name
from millrace.kvp.role import KvpRole
from millrace.prefill.loop import PrefillRole
from millrace.state.leader import LeaderWatch
from support.fleet_sim import model as models
from support.fleet_sim.fibers import FiberCondition, FiberQueue, FiberThread, next_of
from support.fleet_sim.kv_network import SimTransport
from support.fleet_sim.model import OPERATORS, PAGE_TOKENS, Prompts, SimModel, SimShards
from support.fleet_sim.network import Network
from support.fleet_sim.nodes import SCHEDULERS
from support.fleet_sim.processes import NOTHING, Process, VirtualLoop
from support.fleet_sim.store import Store, StoreLink
from support.fleet_sim.tokens import lineage, token_of

#: Operators that one `run` of a thread takes at most.
MOST_TURNS = 12

_THREADS = SimpleNamespace(
    Condition=FiberCondition, Thread=FiberThread, Lock=threading.Lock, Event=threading.Event
)

#: What stands in, by the name that a service has for it.
STAND_INS: dict[str, Any] = {
    "millrace.engine.execution_pool.threading": _THREADS,
    "millrace.transfer.ring.group_link.threading": _THREADS,
    "millrace.transfer.kvp.server.threading.Thread": FiberThread,
    "millrace.transfer.kvp.server.SimpleQueue": FiberQueue,
    "millrace.transfer.kvp.server.next_of": next_of,
    "millrace.instance.shards.shard_host.ShardAttention": SimShards,
    "millrace.prefill.compute.context.sample_first": models.sample_first,
    "millrace.prefill.compute.ring_chunk.operator_names": lambda shape: OPERATORS,
    "millrace.transfer.push.send.manager.TICK_S": 0.5,
    "millrace.transfer.push.receive.manager.TICK_S": 0.5,
    "millrace.transfer.ring.group_link.TICK_S": 0.5,
}


@dataclass(frozen=True, kw_only=True)
class ServiceCard:
    """What an instance is, over all its lives. `role`: prefill | decode | kvp."""

    name: str
    role: str
    pages: int
    latency: SpLatency | None = None
    node: str = "n"


class SimDecodeRole(TokenRole):
    """The role of a decode instance, with a batch that stands in: a step is an action."""

    name = "decode"

    def __init__(self, context: WorkerContext, model: SimModel) -> None:
        tasks, self.table, self.hosted = Tasks(), RequestTable(), ShardTable()
        metrics = DecodeMetrics(context.registry)
        self._model = model
        self._out = Output(context, self.table, metrics)
        self._admissions = Admissions(context, self.table, self._out, metrics, tasks, self.hosted)
        super().__init__(
            context,
            table=self.table,
            output=self._out,
            hosted=self.hosted,
            receiver=self._admissions.receiver,
            spread=self._admissions.spread,
            prefix_cache=self._admissions.prefixes.cache,
            tasks=tasks,
        )

    def complete_registration(self, base: reports.Registration) -> reports.Registration:
        return self.registration(base, None)

    def on_command(self, command: commands.Command) -> None:
        match command:
            case commands.AdmitDecode():
                self._admissions.admit(command)
            case commands.Cancel(request_id=request_id):
                self.cancel(request_id)

    @property
    def has_step(self) -> bool:
        return bool(self.table.leaving or self.table.joining or self._running())

    def _running(self) -> list[DecodeRequest]:
        return [one for one in self.table if one.state is DecodeState.RUNNING]

    def step(self) -> None:
        """Lets ended requests go, then new ones in, and gives every running one a token."""
        leaving, self.table.leaving = self.table.leaving, []
        for request in leaving:
            self._admissions.release(request)
        while self.table.joining:
            request = self.table.joining.popleft()
            if not request.ended:
                self._join(request)
        running = self._running()
        self._out.step_tokens([self._next(one) for one in running], len(running))

    def _join(self, request: DecodeRequest) -> None:
        end = min([request.prompt_tokens, *(one.start_token for one in request.shards)])
        self._model.check(request.id, request.pages.of_choice(0), 0, end)
        request.advance(DecodeEvent.JOINED)
        self._admissions.prefixes.joined(request)
        self._context.send(reports.DecodeStarted(request_id=request.id))

    def _next(self, request: DecodeRequest) -> TokenOut:
        last = request.prompt_tokens + request.generated_tokens - 1
        if all(last < one.start_token for one in request.shards):
            self._model.step(request.id, request.pages.of_choice(0), last)
        position = request.spec.resumed_tokens + request.generated_tokens
        token = token_of(lineage(request.id), position)
        reason = finish_reason(request.sampling, request.generated_tokens + 1, token, ())
        return TokenOut(request.id, 0, token, finish_reason=reason)


class Handlers:
    """In the place of a gRPC server: the methods that a role serves, by name."""

    def __init__(self) -> None:
        self.methods: dict[str, Any] = {}

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Takes those of `add_registered_method_handlers` only."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        for name, handler in handlers.items():
            kinds = handler.unary_unary, handler.unary_stream, handler.stream_stream
            self.methods[name] = next(kind for kind in kinds if kind is not None)


class ServiceInstance:
    """One life of an instance."""

    def __init__(
        self,
        card: ServiceCard,
        generation: int,
        loop: VirtualLoop,
        network: Network,
        store: Store,
        config: Config,
        prompts: Prompts,
    ) -> None:
        self.card = card
        self.name = card.name
        self.process = Process(card.name, loop)
        self.incarnation = Incarnation(card.name, generation)
        self.epoch_obeyed = 0
        self.holds: set[str] = set()  # prompts at a prefill instance
        self.table, self.hosted = RequestTable(), ShardTable()  # of a decode instance
        self._config = config
        self._loop = loop
        self._records = StoreLink(store, "records", self.process)
        leases = StoreLink(store, "leases", self.process)
        self._model = SimModel(card.pages, prompts)
        SimShards.models[self._model.pool.storage.data_ptr()] = self._model
        self.process.call(self._start, network, leases)

    def _start(self, network: Network, leases: StoreLink) -> None:
        transport = SimTransport(transport_name(self.incarnation), self.process, network.kv)
        transport.on_written = self._model.check_written
        engine = self._model.engine()
        context = WorkerContext(
            config=self._config,
            incarnation=self.incarnation,
            transport=transport,
            store=self._records,
            registry=NOTHING,
            send=self._send,
            send_threadsafe=lambda report: self._loop.call_soon_threadsafe(self._send, report),
            engine=engine,
        )
        self.role: Any
        match self.card.role:
            case "prefill":
                self.role = PrefillRole(context)
            case "decode":
                self.role = SimDecodeRole(context, self._model)
                self.table, self.hosted = self.role.table, self.role.hosted
            case "kvp":
                self.role = KvpRole(context, engine)
        handlers: Any = Handlers()
        self.role.attach(handlers)
        network.listen(f"{self.name}:1", self.process, handlers.methods)
        leaders = LeaderWatch(leases, SCHEDULERS)
        self._link = WorkerLink(
            leaders,
            register=self._registration,
            heartbeat=self.role.heartbeat,
            cached_blocks=self.role.cached_blocks,
            on_command=self._on_command,
        )
        self.process.spawn(leaders.run())
        self.process.spawn(self._link.run())
        self.process.spawn(self.role.run())

    def _registration(self) -> reports.Registration:
        return self.role.complete_registration(
            reports.Registration(
                incarnation=self.incarnation,
                role=self.card.role,
                address=f"{self.name}:1",
                model_hash="h",
                kv_pages=self.card.pages,
                page_tokens=PAGE_TOKENS,
                max_context_tokens=4096,
                latency=self.card.latency,
                node=self.card.node,
            )
        )

    def _on_command(self, command: commands.Command) -> None:
        epoch = self.process.epoch_read
        assert epoch >= self.epoch_obeyed, (
            f"{self.name} obeys epoch {epoch} after epoch {self.epoch_obeyed}"
        )
        self.epoch_obeyed = epoch
        if isinstance(command, commands.RunPrefill | commands.AdmitDecode):
            self._model.hear(command.request)
        if isinstance(command, commands.RunPrefill):
            name = command.request.request_id
            assert name not in self.holds, f"{self.name} has {name}"
            self.holds.add(name)
        self.role.on_command(command)

    def _send(self, report: reports.Report) -> None:
        if isinstance(report, reports.RequestReleased):
            self.holds.discard(report.request_id)
        self._link.send(report)

    # ---- what may happen here

    def work(self) -> Iterator[str]:
        if any(one.is_ready and not one.is_over for one in self.process.fibers):
            yield "turn"
        if self.card.role == "decode" and not self.process.is_late and self.role.has_step:
            yield "step"

    def do(self, verb: str) -> bool:
        """Does a piece of work: `turn` is one operator, `run` some."""
        if self.process.has_lost or self.process.paused:
            return False
        match verb:
            case "turn":
                return self._turn()
            case "run":
                return self._turn() and self._turns(MOST_TURNS)
            case "step" if self.card.role == "decode" and self.role.has_step:
                self.process.call(self.role.step)
                return True
        return False

    def _turn(self) -> bool:
        for fiber in self.process.fibers:
            if fiber.is_ready and not fiber.is_over:
                fiber.go_on()
                return True
        return False

    def _turns(self, most: int) -> bool:
        while most and self._turn():
            most -= 1
            if not self.process.is_late:
                self._loop.run_ready()
        return True

    def lose_sender(self, dead: Incarnation) -> None:
        """Learns of it as the services do."""

    # ---- what it holds

    def held(self) -> list[str]:
        return [*self.holds, *(request.id for request in self.table), *self.shards()]

    def shards(self) -> list[str]:
        """Returns the requests of which a decode instance has a shard for another one."""
        return [shard.ask.request_id for shard in self.hosted]

    @property
    def is_busy(self) -> bool:
        """Whether it holds anything, pages in quarantine included."""
        if self.held() or any(self.role.counts()):
            return True
        try:
            self.role.check_integrity()
        except IntegrityError:
            return True
        return False

    def check_idle(self) -> None:
        """Raises AssertionError or IntegrityError if it holds anything."""
        assert not self.held(), f"{self.name} holds {self.held()}"
        assert not any(self.role.counts()), f"{self.name} holds something"
        self.role.check_integrity()
        if self.card.role != "kvp":
            self._model.check_cached(self.role.prefix_cache)

    def cached_tokens(self, hashes: Sequence[int]) -> int:
        """Returns how many first tokens of the blocks are cached here."""
        if self.card.role == "kvp":
            return 0
        cache = self.role.prefix_cache
        return cache.holds(hashes) * cache.block_tokens
