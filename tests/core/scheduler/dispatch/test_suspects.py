"""A request that kills instances ends after few of them, and no other request pays for it.

A small model of a fleet and a proxy drives the machine: every tick an instance computes one prompt,
or one token of each answer. Instances start again after they died.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.incarnation import Incarnation
from millrace.core.scheduler import effects, events
from support.core_events import Bench, instance, request
from support.seeds import seeds

POISON = "poison"
TOKENS = 12
TICK_S = 0.25


class Fleet:
    """`kills`: the role that dies of the poison; `at_token`: after so many tokens of its answer."""

    def __init__(self, kills: str, at_token: int, config: SchedulerConfig, seed: int) -> None:
        self.random = random.Random(seed)
        self.kills, self.at_token = kills, at_token
        self.bench = Bench(config=config)
        self.generation = dict.fromkeys(("p0", "p1", "d0", "d1", "d2"), 1)
        self.down: dict[str, int] = {}  # instance -> ticks until it is back
        self.queues: dict[str, list[str]] = {}
        self.batches: dict[str, dict[str, int]] = {}  # decode -> tokens to come, by request
        self.at: dict[str, str] = {}  # request -> decode instance
        self.left: dict[str, int] = {}  # client's request -> tokens to come
        self.lost: dict[str, tuple[Incarnation, ...]] = {}
        self.refused: list[str] = []
        self.moves: Counter[str] = Counter()
        self.deaths: Counter[str] = Counter()  # by the role
        self.ended: dict[str, str] = {}
        for name in self.generation:
            self.start(name)

    def step(self, event: events.Event) -> None:
        self.carry_out(self.bench.step(event))

    def start(self, name: str) -> None:
        self.queues[name], self.batches[name] = [], {}
        self.step(instance(name, generation=self.generation[name]))

    def submit(self, name: str) -> None:
        self.left[name] = TOKENS
        self.offer(name)

    def offer(self, request_id: str) -> None:
        new = request(request_id, arrival_s=self.bench.now_s).request
        deaths = self.lost.get(request_id, ())
        self.step(events.Submitted(request=replace(new, deaths=deaths)))

    def carry_out(self, found: list[effects.Effect]) -> None:
        for effect in found:
            match effect:
                case effects.Place():
                    self.at[effect.request_id] = effect.decode_id
                case effects.RunPrefill(instance_id=name, request_id=of):
                    self.queues[name].append(of)
                case effects.Order():
                    refs = [ref.request_id for entry in effect.queue for ref in entry]
                    self.queues[effect.instance_id] = refs
                case effects.CancelOn(instance_id=name, request_id=of):
                    if name not in self.down:
                        self.batches[name].pop(of, None)
                        self.queues[name] = [one for one in self.queues[name] if one != of]
                        self.carry_out(self.report(name, "released", of))
                case effects.Suspect():
                    self.lost[effect.request_id] = effect.deaths
                case effects.Refuse():
                    assert effect.code == "unavailable"
                    self.refused.append(effect.request_id)
                case effects.Fail():
                    self.failed(effect)

    def report(self, name: str, kind: str, *words: str, **more: bool) -> list[effects.Effect]:
        """Lets an instance report, in its present incarnation."""
        before = self.bench.step
        generation = self.generation[name]

        def step(event: events.Event) -> list[effects.Effect]:
            assert isinstance(event, events.Reported)
            return before(replace(event, generation=generation))

        self.bench.step = step  # type: ignore[method-assign]
        try:
            return getattr(self.bench, kind)(name, *words, **more)
        finally:
            self.bench.step = before  # type: ignore[method-assign]

    def failed(self, effect: effects.Fail) -> None:
        name = effect.request_id.partition(".")[0]
        if effect.resumable:
            self.migrate(effect.request_id)
        else:
            self.ended[name] = "quarantined" if effect.quarantined else effect.message

    def migrate(self, request_id: str) -> None:
        name = request_id.partition(".")[0]
        self.moves[name] += 1
        next_id = f"{name}.{self.moves[name]}"
        self.lost[next_id] = self.lost.get(request_id, ())
        self.offer(next_id)

    # ---- time

    def tick(self) -> None:
        for name in [one for one, ticks in self.down.items() if ticks == 0]:
            del self.down[name]
            self.generation[name] += 1
            self.start(name)
        self.down = {name: ticks - 1 for name, ticks in self.down.items()}
        refused, self.refused = self.refused, []
        for request_id in refused:
            self.offer(request_id)
        names = list(self.generation)
        self.random.shuffle(names)
        for name in names:
            if name not in self.down:
                self.prefill(name) if name[0] == "p" else self.decode(name)
        self.carry_out(self.bench.tick(TICK_S))

    def dies(self, name: str) -> None:
        self.deaths[name[0]] += 1
        self.down[name] = self.random.randrange(3)
        if self.random.random() < 0.5:  # the proxy sees it first
            for request_id in [one for one in self.batches[name] if self.at[one] == name]:
                self.carry_out(self.bench.cancel(request_id, "it is migrated"))
                known = self.lost.get(request_id, ())
                self.lost[request_id] = (*known, Incarnation(name, self.generation[name]))
                self.migrate(request_id)
        self.carry_out(self.bench.died(name, self.generation[name]))

    def prefill(self, name: str) -> None:
        if not self.queues[name]:
            return
        request_id = self.queues[name].pop(0)
        self.carry_out(self.report(name, "chunk_started", request_id))
        if self.kills == "prefill" and request_id.startswith(POISON):
            self.dies(name)
            return
        self.carry_out(self.report(name, "computed", request_id))
        self.carry_out(self.report(name, "released", request_id, complete=True))
        decode = self.at[request_id]
        if decode not in self.down and request_id in self.bench.machine.requests:
            self.batches[decode][request_id] = self.left[request_id.partition(".")[0]]
            self.carry_out(self.report(decode, "decoding", request_id))

    def decode(self, name: str) -> None:
        for request_id in list(self.batches[name]):
            of = request_id.partition(".")[0]
            if self.kills == "decode" and of == POISON and TOKENS - self.left[of] >= self.at_token:
                self.dies(name)
                return
            self.left[of] -= 1
            if self.left[of] == 0:
                del self.batches[name][request_id]
                self.ended[of] = "finished"
                self.carry_out(self.report(name, "finished", request_id))


@pytest.mark.parametrize("max_deaths", [1, 2, 3])
@pytest.mark.parametrize(("kills", "at_token"), [("prefill", 0), ("decode", 0), ("decode", 5)])
@pytest.mark.parametrize("bystanders", [0, 9])
def test_a_poison_ends_and_the_others_finish(kills, at_token, max_deaths, bystanders):
    for seed in range(4):
        config = SchedulerConfig(max_deaths=max_deaths, isolation_s=2.0, batch_tokens=0)
        fleet = Fleet(kills, at_token, config, seed)
        arrivals = [f"b{number}" for number in range(bystanders)]
        arrivals.insert(fleet.random.randrange(len(arrivals) + 1), POISON)
        names = set(arrivals)
        for _ in range(600):
            if arrivals and fleet.random.random() < 0.7:
                fleet.submit(arrivals.pop())
            if len(fleet.ended) == len(names):
                break
            fleet.tick()
        assert fleet.ended.pop(POISON) == "quarantined"
        assert fleet.ended == dict.fromkeys(names - {POISON}, "finished")
        most = max_deaths if not bystanders else max_deaths + 1
        assert max_deaths <= fleet.deaths.total() <= most
        assert fleet.bench.machine.suspects.quarantined == 1
        assert not fleet.bench.machine.requests


@pytest.mark.parametrize("seed", seeds(4, 12))
def test_random_deaths_cost_no_request(seed):
    """No request is to blame when instances with many requests die one after the other."""
    config = SchedulerConfig(max_deaths=2, isolation_s=1.0, batch_tokens=0)
    fleet = Fleet("nothing", 0, config, seed)
    names = [f"b{number}" for number in range(9)]
    for name in names:
        fleet.submit(name)
    for ticks in range(900):
        if len(fleet.ended) == len(names):
            break
        crowded = [one for one, batch in fleet.batches.items() if len(batch) > 1]
        if ticks % 4 == 0 and ticks < 40 and (alive := set(crowded) - set(fleet.down)):
            fleet.dies(min(alive))
        fleet.tick()
    assert fleet.deaths.total() > 2
    assert fleet.ended == dict.fromkeys(names, "finished")


def lost_by_a_peer_first(config: SchedulerConfig, times: int, *, later_s: float) -> Bench:
    """The only decode instance dies with a prompt so many times, and comes back; prefill notices it
    first. `later_s`: until the scheduler does.
    """
    bench = Bench(instance("p0"), instance("d0"), config=config)
    bench.step(request("r"))
    for generation in range(1, times + 1):
        bench.chunk_started("p0", "r")
        bench.failed("p0", "r", fault="transfer")
        bench.released("p0", "r")
        bench.tick(later_s)
        bench.died("d0", generation)
        bench.step(instance("d0", generation=generation + 1))
    return bench


def test_a_loss_that_a_peer_notices_first_costs_no_attempt():
    config = SchedulerConfig(max_attempts=3, max_deaths=16, lease_s=1.0)
    bench = lost_by_a_peer_first(config, 5, later_s=0.5)
    assert len(bench.machine.requests["r"].suspicion.deaths) == 5


def test_a_loss_long_after_an_error_explains_it_no_more():
    config = SchedulerConfig(max_attempts=3, max_deaths=16, lease_s=1.0)
    assert not lost_by_a_peer_first(config, 5, later_s=1.5).machine.requests


def test_a_poison_that_a_peer_notices_first_is_quarantined():
    bench = lost_by_a_peer_first(SchedulerConfig(max_deaths=2, lease_s=1.0), 3, later_s=0.1)
    assert not bench.machine.requests
    assert bench.machine.suspects.quarantined == 1
