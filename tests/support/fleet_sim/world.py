"""A whole fleet in one thread: what may happen next, what may fail, and what must always hold.

An action has a name, and a run is a list of names: an action that can't happen now is left out, so
that every part of a run is a run, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import Any
from unittest.mock import patch

from millrace.core.config import Config
from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.scheduler.fleet.instances import KvpInstance
from millrace.core.scheduler.machine import Machine
from support.fleet_sim.instances import Card, Instance
from support.fleet_sim.model import Prompts
from support.fleet_sim.network import Network
from support.fleet_sim.nodes import Client, ProxyNode, SchedulerNode
from support.fleet_sim.processes import VirtualLoop
from support.fleet_sim.services import STAND_INS, ServiceCard, ServiceInstance
from support.fleet_sim.store import Store
from support.fleet_sim.streams import TIMES_S, StreamClient
from support.fleet_sim.tokens import FAMILY, number_of

AnyInstance = Instance | ServiceInstance
Node = SchedulerNode | ProxyNode | AnyInstance

SP = SpLatency(by_sp={1: Latency(b=1e-3), 2: Latency(b=5e-4)})
SP3 = SpLatency(by_sp={1: Latency(b=1e-3), 2: Latency(b=5e-4), 3: Latency(b=3.4e-4)})
CARDS: dict[str, Card | ServiceCard] = {
    card.name: card
    for card in (
        *(ServiceCard(name=f"q{i}", role="prefill", pages=120, latency=SP3) for i in range(3)),
        *(ServiceCard(name=f"e{i}", role="decode", pages=100) for i in range(2)),
        *(ServiceCard(name=f"k{i}", role="kvp", pages=40) for i in range(2)),
        *(ServiceCard(name=f"q{i}", role="prefill", pages=52, latency=SP3) for i in range(5, 7)),
        *(ServiceCard(name=f"e{i}", role="decode", pages=44) for i in range(5, 7)),
        *(ServiceCard(name=f"e{i}", role="decode", pages=12) for i in range(7, 9)),
        Card(name="p0", role="prefill", pages=100, latency=SP, node="n"),
        Card(name="p1", role="prefill", pages=100, latency=SP, node="n"),
        Card(name="d0", role="decode", pages=60),
        Card(name="d1", role="decode", pages=60),
        Card(name="m0", role="mixed", pages=60, latency=SP),
    )
}
SCHEDULERS = ("s0", "s1")
ACTION_S = 0.004
NOTED_S = 0.5  # until a leader's note of its peers is in the store
#: Kinds of work of the instances.
WORK = ("compute", "release", "land", "step", "steps", "turn", "run")
SETTLES_S = 3.0
MOST_QUIET_S = 90.0  # from the end of all faults until everything has ended

CHANNELS = (
    "millrace.wire.channel.open_channel",
    "millrace.wire.clients.scheduler_stream.open_channel",
    "millrace.wire.clients.proxy_stream.open_channel",
    "millrace.wire.clients.token_stream.open_channel",
)
LEASE_STEPS = ("millrace.scheduler.leadership.RENEWALS", "millrace.scheduler.leadership.ATTEMPTS")


def at_a_stretch(action: str) -> str:
    """Returns the action that does more of the same at once."""
    return action.replace("deliver", "flush", 1).replace("turn ", "run ", 1)


class World:
    def __init__(self, loop: VirtualLoop, config: Config, members: Sequence[str]) -> None:
        self.loop = loop
        self.config = config
        self.network = Network()
        self.store = Store(loop)
        self.fleet: dict[str, Any] = {}  # of one kind, Instance or ServiceInstance
        self._prompts = Prompts()
        self.nodes: dict[str, Node] = {}
        self.clients: dict[str, Client | StreamClient] = {}
        self.faults = self.losses = 0  # losses: of the store's data
        self.proxy_ends = 0
        #: Requests may be refused without a fault: the queues are short.
        self.is_narrow = config.proxy.max_inflight < 16
        self.is_patient = config.scheduler.takeover_wait_s > 0.5
        self._generations: dict[str, int] = {}
        self.proxies = [name for name in members if name not in CARDS]
        self._members = members
        self._verbs: dict[str, Callable[..., bool]] = {
            "deliver": lambda name: self._deliver(name, 1),
            "flush": lambda name: self._deliver(name, 1 << 30),
            **{verb: partial(self._work, verb) for verb in WORK},
            "time": self._pass_time,
            "settle": self._settle,
            "submit": self._submit,
            "stream": self._stream,
            "ask": self._ask,
            "drop": self._drop,
            "leave": self._leave,
            "start": self._start_again,
            "kill": self._kill,
            "pause": self._pause,
            "late": self._be_late,
            "resume": self._resume,
            "cut": lambda name: self._cut(name, True),
            "mend": lambda name: self._cut(name, False),
            "break": self._break,
            "store": self._store,
        }

    def patched(self) -> AbstractContextManager[object]:
        """Has the services open their channels here."""
        stack = ExitStack()
        for name in CHANNELS:
            stack.enter_context(patch(name, self.network.open_channel))
        for name in LEASE_STEPS:  # fewer: most work of a run would be looks at the lease
            stack.enter_context(patch(name, 2))
        for name, value in (TIMES_S | STAND_INS).items():
            stack.enter_context(patch(name, value))
        return stack

    # ---- nodes

    def start(self) -> None:
        """Starts all, and lets them meet."""
        for name in (*SCHEDULERS, *self._members):
            self._start(name)
            self.loop.run_ready()
        for _ in range(40):
            ready = all(self.proxy(name).gateway.ready for name in self.proxies)
            if ready and self._is_complete():
                return
            self.flush_all()
            self.loop.advance(0.05)
        raise AssertionError("the fleet has not started")

    def _is_complete(self) -> bool:
        """Whether the next leader would know of all instances, KVP workers among them."""
        if not any(isinstance(CARDS.get(name), ServiceCard) for name in self._members):
            return True
        machine = self.machine()
        if machine is None or len(machine.cluster.instances) < len(self.fleet):
            return False
        self.flush_all()
        self.loop.advance(NOTED_S)
        return True

    def _start(self, name: str) -> None:
        generation = self._generations[name] = self._generations.get(name, 0) + 1
        if name in SCHEDULERS:
            self.nodes[name] = SchedulerNode(name, self.loop, self.network, self.store, self.config)
        elif name in self.proxies:
            self.nodes[name] = ProxyNode(name, generation, self.loop, self.store, self.config)
        else:
            self.fleet[name] = self.nodes[name] = self._instance(name, generation)

    def _instance(self, name: str, generation: int) -> AnyInstance:
        card, around = CARDS[name], (self.loop, self.network, self.store, self.config)
        if isinstance(card, ServiceCard):
            return ServiceInstance(card, generation, *around, self._prompts)
        return Instance(card, generation, *around, self.fleet)

    def proxy(self, name: str) -> ProxyNode:
        node = self.nodes[name]
        assert isinstance(node, ProxyNode)
        return node

    def leader(self) -> SchedulerNode | None:
        """Returns the living scheduler with the latest epoch."""
        leading = [
            node
            for node in self.nodes.values()
            if isinstance(node, SchedulerNode) and node.epoch and node.process.alive
        ]
        return max(leading, key=lambda one: one.epoch, default=None)

    def machine(self) -> Machine | None:
        leader = self.leader()
        return leader.leading.machine if leader is not None and leader.leading else None

    # ---- actions

    def work(self) -> list[str]:
        """Lists what can happen now, without faults."""
        found = [f"deliver {wire.name}" for wire in self.network.wires()]
        for name, one in self.fleet.items():
            if one.process.alive and not one.process.paused:
                found += [f"{verb} {name}" for verb in one.work()]
        return found + self._asks()

    def _asks(self) -> list[str]:
        """Lists the clients that may ask again, and the proxies that hear them."""
        now_s = self.loop.now_s
        return [
            f"ask {one.name} {proxy}"
            for one in self.clients.values()
            if one.asks_at_s is not None and one.asks_at_s <= now_s and not one.is_over
            for proxy in self.proxies
            if self._hears(proxy)
        ]

    def _hears(self, name: str) -> bool:
        process = self.nodes[name].process
        return not (process.has_lost or process.paused)

    def _stream_clients(self) -> list[StreamClient]:
        return [one for one in self.clients.values() if isinstance(one, StreamClient)]

    def repairs(self) -> list[str]:
        """Lists what ends a fault now."""
        found = [] if self.store.mode == "up" else ["store up"]
        for name, node in self.nodes.items():
            if node.process.has_lost:
                found.append(f"start {name}")
            if node.process.paused or node.process.is_late:
                found.append(f"resume {name}")
            if node.process.is_cut:
                found.append(f"mend {name}")
        return found

    def perform(self, action: str) -> bool:
        """Performs an action and all that follows at once; returns False if it can't happen."""
        verb, _, rest = action.partition(" ")
        done = self._verbs[verb](*([rest] if rest else []))
        if done:
            self.loop.run_ready()
            self.loop.advance(ACTION_S)
            self._check_processes()
        return done

    def _deliver(self, name: str, most: int) -> bool:
        for wire in self.network.wires():
            if wire.name == name:
                wire.deliver(most)
                return True
        return False

    def _work(self, verb: str, name: str) -> bool:
        return self.fleet[name].do(verb)

    def _pass_time(self, seconds: str) -> bool:
        self.faults += bool(self.network.wires())  # it is slow
        self.loop.advance(float(seconds))
        return True

    def _settle(self) -> bool:
        """Lets all work until it is done, or for SETTLES_S."""
        until_s = self.loop.now_s + SETTLES_S
        while self.loop.now_s < until_s and any(not one.is_over for one in self.clients.values()):
            self._go_on()
        return True

    def _submit(self, rest: str) -> bool:
        name, proxy, prompt, new = rest.split()
        node = self.proxy(proxy)
        if node.process.has_lost or name in self.clients:
            return False
        client = self.clients[name] = Client(name, proxy, int(prompt), int(new))
        node.submit(client)
        return True

    def _leave(self, name: str) -> bool:
        client = self.clients.get(name)
        if client is None or client.is_over or self.nodes[client.proxy].process.paused:
            return False
        if isinstance(client, Client):
            if client.asks_at_s is None:
                self.proxy(client.proxy).leave(client)
            client.gone = True
            return True
        client.gone = True
        if client.connection is not None:
            client.connection.close(self.loop.now_s)
        return True

    # ---- clients of resumable streams

    def _stream(self, rest: str) -> bool:
        name, proxy, prompt, new = rest.split()
        if self.nodes[proxy].process.has_lost or name in self.clients:
            return False
        client = self.clients[name] = StreamClient(name, proxy, int(prompt), int(new))
        self.proxy(proxy).streams.connect(client)
        return True

    def _ask(self, rest: str) -> bool:
        if f"ask {rest}" not in self._asks():
            return False
        name, proxy = rest.split()
        client = self.clients[name]
        client.proxy = proxy
        if isinstance(client, Client):
            self.proxy(proxy).submit(client)
        else:
            self.proxy(proxy).streams.connect(client)
        return True

    def _drop(self, rest: str) -> bool:
        """A client's connection breaks, and its last events are lost on the way."""
        name, events = rest.split()
        client = self.clients.get(name)
        if not isinstance(client, StreamClient) or client.connection is None or client.is_over:
            return False
        self.faults += 1
        client.break_off(int(events), self.loop.now_s)
        return True

    # ---- faults

    def _kill(self, name: str) -> bool:
        node = self.nodes[name]
        if node.process.has_lost:
            return False
        self.faults += 1
        self._end(node)
        return True

    def _end(self, node: Node) -> None:
        node.process.kill()
        self.network.close(node.process)
        if isinstance(node, Instance | ServiceInstance):
            for other in self.fleet.values():
                if other is not node:
                    other.process.post(other.lose_sender, node.incarnation)
        if isinstance(node, ProxyNode):
            self.proxy_ends += 1
            for client in self.clients.values():
                if client.proxy == node.name and not client.is_over:
                    self._lose_proxy(client)

    def _lose_proxy(self, client: Client | StreamClient) -> None:
        if isinstance(client, Client):
            client.gone = client.asks_at_s is None
        elif client.connection is not None:
            client.connection.close(self.loop.now_s)

    def _start_again(self, name: str) -> bool:
        if not self.nodes[name].process.has_lost:
            return False
        self._start(name)
        return True

    def _pause(self, name: str) -> bool:
        process = self.nodes[name].process
        if process.has_lost or process.paused:
            return False
        self._silence(name)
        process.pause()
        return True

    def _resume(self, name: str) -> bool:
        process = self.nodes[name].process
        if not (process.paused or process.is_late):
            return False
        process.resume()
        return True

    def _be_late(self, name: str) -> bool:
        """An event loop stands still, while the process's other threads go on."""
        process = self.nodes[name].process
        if process.has_lost or process.paused or process.is_late:
            return False
        self._silence(name)
        process.is_late = True
        return True

    def _cut(self, name: str, is_cut: bool) -> bool:
        process = self.nodes[name].process
        if process.is_cut == is_cut:
            return False
        if is_cut:
            self._silence(name)
        process.is_cut = is_cut
        return True

    def _silence(self, name: str) -> None:
        """Counts a fault after which a stream's owner may not hear of its clients."""
        self.faults += 1
        if name in self.proxies or name == "store":
            for client in self._stream_clients():
                client.may_expire = True

    def _break(self, name: str) -> bool:
        for call in self.network.calls:
            if not call.over and call.up.name == name:
                self.faults += 1
                call.break_()
                return True
        return False

    def _store(self, mode: str) -> bool:
        self._silence("store")
        if mode == "lost":
            self.losses += 1
            for client in self._stream_clients():
                client.may_be_lost |= not self._is_generated(client)
            self.store.lose_data()
        else:
            self.store.mode = mode
        return True

    def _check_processes(self) -> None:
        """A scheduler that has lost the lease ends, and is started again; nothing else may end."""
        for node in list(self.nodes.values()):
            failure = node.process.failure
            if failure is None or node.process.has_lost:
                continue
            if isinstance(node, SchedulerNode) and "epoch" in str(failure):
                self._end(node)
                self._start(node.name)
            else:
                raise failure
        assert not self.loop.errors, self.loop.errors
        assert not self._prompts.wrong, self._prompts.wrong
        for client in self.clients.values():
            assert not client.wrong, client.wrong

    # ---- the end

    def flush_all(self) -> None:
        for wire in self.network.wires():
            wire.deliver(1 << 30)
        self.loop.run_ready()

    def pass_time(self, seconds: float) -> None:
        self.loop.advance(seconds)
        self._check_processes()

    def heal(self) -> None:
        """Ends all faults: what is dead starts again."""
        self.store.mode = "up"
        for name in list(self.nodes):
            self._resume(name)
            self._cut(name, False)
            self._start_again(name)
        self.loop.run_ready()

    def finish(self) -> None:
        """Ends all faults and lets the fleet work until nothing is left. Raises AssertionError if
        anything is left after MOST_QUIET_S.
        """
        self.heal()
        until_s = self.loop.now_s + MOST_QUIET_S
        while not self._is_quiet():
            assert self.loop.now_s < until_s, f"no end: {self.left()}"
            self._go_on()
        self.check_idle()
        if any(number_of(name) >= FAMILY for name in self.clients):
            self._check_cached()

    def _check_cached(self) -> None:
        """Raises AssertionError unless the leader knows what all instances have in their caches."""
        until_s = self.loop.now_s + 2 * self.config.scheduler.heartbeat_s
        while self.loop.now_s < until_s:
            self._go_on()
        machine = self.machine()
        assert machine is not None
        for name, one in self.fleet.items():
            its = machine.cluster.instances[name]
            if isinstance(its, KvpInstance):
                continue
            for asked, text in self._prompts.texts.items():
                known, held = (
                    its.prefixes.tokens(text.hashes, 1 << 20),
                    one.cached_tokens(text.hashes),
                )
                assert known == held, (
                    f"{name} has {held} cached tokens of {asked}, the leader believes {known}"
                )

    def _go_on(self) -> None:
        before = self.loop.now_s
        while work := self.work():
            for action in work:
                self.perform(at_a_stretch(action))
            assert self.loop.now_s < before + MOST_QUIET_S, f"no rest: {work}"
        due_s = self.loop.next_timer_s()
        assert due_s is not None
        self.loop.advance(max(due_s - self.loop.now_s, 0.0) + 0.05)
        self._check_processes()

    def _is_quiet(self) -> bool:
        if any(not client.is_over for client in self.clients.values()):
            return False
        machine = self.machine()
        if machine is None or machine.requests:
            return False
        held = any(one.holdings for one in machine.cluster.instances.values())
        busy = any(one.is_busy for one in self.fleet.values())
        proxies = any(self.proxy(name).gateway.inflight for name in self.proxies)
        streams = any(self._is_generated(one) for one in self._stream_clients())
        return not (held or busy or proxies or streams)

    def _is_generated(self, client: StreamClient) -> bool:
        """Whether any proxy generates the client's stream."""
        owned = (self.proxy(name).streams.owned for name in self.proxies)
        return any(streams.find(client.stream_id) for streams in owned)

    def left(self) -> str:
        machine = self.machine()
        found = [f"{one.name} of {one.proxy}" for one in self.clients.values() if not one.is_over]
        if machine is not None:
            found += [f"{name}: {one.state.value}" for name, one in machine.requests.items()]
            found += [
                f"{name} holds {one.holdings}"
                for name, one in machine.cluster.instances.items()
                if one.holdings
            ]
        for name, one in self.fleet.items():
            found += [f"{name} has {held}"] if (held := one.held()) else []
        return "; ".join(found)

    def check_idle(self) -> None:
        """Raises AssertionError unless everything is as if no request had ever been."""
        machine = self.machine()
        assert machine is not None
        machine.check_integrity()
        assert machine.release_timeouts == 0, "pages were not freed in time"
        assert machine.stalled == 0, "prepared work did not begin"
        for name in self.proxies:
            self.proxy(name).gateway.check_integrity()
        for one in self.fleet.values():
            one.check_idle()
        for client in self.clients.values():
            check_outcome(client, self)

    def close(self) -> None:
        for node in self.nodes.values():
            node.process.kill()


def check_outcome(client: Client | StreamClient, world: World) -> None:
    """Raises AssertionError for an end that the promise does not allow."""
    if client.refused is not None and not world.faults and not world.is_narrow:
        raise AssertionError(f"{client.name} was refused without any fault: {client.refused}")
    if client.done or client.gone:
        return
    if isinstance(client, StreamClient) and world.losses and world.proxy_ends:
        return  # its owner may have ended before it wrote the stream again
    if isinstance(client, StreamClient) and client.lost:
        assert client.may_be_lost, f"{client.name} is not known"
        return
    error = client.error
    assert error is not None
    if world.losses and "fit in no pair" in error.message:
        return  # the next leader does not know that the fleet was larger
    if not world.faults:
        raise AssertionError(f"{client.name} failed without any fault: {error.message}")
    if isinstance(client, StreamClient) and client.may_expire and error.code == "expired":
        return
    assert "open at instances when they died" in error.message, f"{client.name}: {error.message}"
