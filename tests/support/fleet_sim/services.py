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
from millrace.core.scheduler import commands, reports
from millrace.decode.loop import DecodeRole
from millrace.decode.request_table import RequestTable
from millrace.instance.link import WorkerLink
from millrace.instance.role import WorkerContext
from millrace.instance.shards.shard_table import ShardTable
from millrace.instance.transfer.transports import transport_name
from millrace.kvp.role import KvpRole
from millrace.prefill.loop import PrefillRole
from millrace.state.leader import LeaderWatch
from support.fleet_sim import model as models
from support.fleet_sim.fibers import (
    FiberCondition,
    FiberExecutor,
    FiberQueue,
    FiberThread,
    next_of,
)
from support.fleet_sim.kv_network import SimTransport
from support.fleet_sim.model import OPERATORS, PAGE_TOKENS, Prompts, SimModel, SimShards
from support.fleet_sim.network import Network
from support.fleet_sim.nodes import SCHEDULERS
from support.fleet_sim.processes import NOTHING, Process, VirtualLoop
from support.fleet_sim.store import Store, StoreLink

#: Operators or steps that one `run`, or `steps`, of a thread takes at most.
MOST_TURNS = 12
AT_ONCE = {"run": "turn", "steps": "step"}

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
    "millrace.decode.loop.ThreadPoolExecutor": FiberExecutor,
    "millrace.decode.memory.swapping.ThreadPoolExecutor": FiberExecutor,
    "millrace.decode.running.Sampler": models.SimSampler,
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
                self.role = DecodeRole(context)
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
        yield from {one.verb: None for one in self.process.fibers if one.is_at_work}

    def do(self, verb: str) -> bool:
        """Does a piece of work: `turn` is an operator, `step` a step of decode; `run` and `steps`
        are some.
        """
        if self.process.has_lost or self.process.paused:
            return False
        single = AT_ONCE.get(verb, verb)
        if not self._turn(single):
            return False
        if verb in AT_ONCE:
            self._turns(single, MOST_TURNS)
        return True

    def _turn(self, verb: str) -> bool:
        for fiber in self.process.fibers:
            if fiber.verb == verb and fiber.is_at_work:
                fiber.go_on()
                return True
        return False

    def _turns(self, verb: str, most: int) -> None:
        while most and self._turn(verb):
            most -= 1
            if not self.process.is_late:
                self._loop.run_ready()

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
