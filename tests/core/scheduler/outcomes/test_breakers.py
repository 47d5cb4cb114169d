"""An instance at fault costs no request, and no other instance its work.

A small model of a fleet drives the machine: every tick each prefill instance does one prompt, and
its KV goes to the decode instance at once. d2 is the freest decode instance. An instance at fault
fails all that it takes part in.
"""

from __future__ import annotations

import random
from collections.abc import Collection

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.scheduler import effects
from millrace.core.scheduler.outcomes.breakers import MOST_ERRORS
from support.core_events import Bench, instance
from support.seeds import seeds

TICK_S = 0.5
PREFILL, DECODE = ("p0", "p1"), ("d0", "d1", "d2")


class Fleet:
    """`bad`: instances at fault. `fault`: the kind of their errors. `poison`: requests that fail
    wherever they are computed, with errors of the kind `poison_fault`.
    """

    def __init__(self, seed: int, config: SchedulerConfig, poison: Collection[str] = ()) -> None:
        self.random = random.Random(seed)
        cards = [instance(name, pages=120 if name == "d2" else 100) for name in (*PREFILL, *DECODE)]
        self.bench = Bench(*cards, config=config)
        self.bad: set[str] = set()
        self.fault = "transfer"
        self.poison = poison
        self.poison_fault = "transfer"
        self.queues: dict[str, list[str]] = {name: [] for name in PREFILL}
        self.at: dict[str, str] = {}  # request -> decode instance
        self.ended: dict[str, str] = {}
        self.errors = 0
        self.opened: set[str] = set()

    def carry_out(self, found: list[effects.Effect]) -> None:
        for effect in found:
            match effect:
                case effects.Place():
                    self.at[effect.request_id] = effect.decode_id
                case effects.RunPrefill(instance_id=name, request_id=of):
                    self.queues[name].append(of)
                case effects.CancelOn(instance_id=name, request_id=of):
                    if name in self.queues:
                        self.queues[name] = [one for one in self.queues[name] if one != of]
                    self.carry_out(self.bench.released(name, of))
                case effects.Order():
                    refs = [ref.request_id for entry in effect.queue for ref in entry]
                    self.queues[effect.instance_id] = refs
                case effects.Fail():
                    self.ended[effect.request_id] = effect.message

    def submit(self, name: str) -> None:
        self.carry_out(self.bench.submit(name))

    def tick(self) -> None:
        for name in self.random.sample(PREFILL, len(PREFILL)):
            if self.queues[name]:
                self.compute(name, self.queues[name].pop(0))
        self.carry_out(self.bench.tick(TICK_S))
        states = {name: self.bench.machine.breakers.state(name) for name in (*PREFILL, *DECODE)}
        self.opened |= {name for name, state in states.items() if state != "closed"}

    def compute(self, name: str, request_id: str) -> None:
        decode = self.at[request_id]
        self.carry_out(self.bench.chunk_started(name, request_id))
        if request_id in self.poison:
            self.fail(name, request_id, self.poison_fault)
        elif decode in self.bad or name in self.bad:
            reporter = name if self.fault == "compute" else self.random.choice((name, decode))
            self.fail(reporter, request_id, self.fault)
        else:
            self.carry_out(self.bench.computed(name, request_id))
            self.carry_out(self.bench.released(name, request_id, complete=True))
            self.carry_out(self.bench.decoding(decode, request_id))
            self.carry_out(self.bench.finished(decode, request_id))
            self.ended[request_id] = "finished"

    def fail(self, reporter: str, request_id: str, fault: str) -> None:
        self.errors += 1
        retryable = request_id not in self.poison or fault != "compute"
        failed = self.bench.failed(reporter, request_id, retryable=retryable, fault=fault)
        released = self.bench.released(reporter, request_id)
        self.carry_out([*failed, *released])


def run(fleet: Fleet, requests: int, ticks: int = 400) -> None:
    for tick in range(ticks):
        if tick % 2 == 0 and tick // 2 < requests:
            fleet.submit(f"r{tick // 2}")
        fleet.tick()
        if len(fleet.ended) == requests:
            return


@pytest.mark.parametrize("seed", seeds(2, 6))
@pytest.mark.parametrize(
    ("bad", "fault"),
    [("p0", "compute"), ("p0", "transfer"), ("d2", "transfer")],
)
def test_requests_go_round_an_instance_at_fault(bad: str, fault: str, seed: int) -> None:
    def played(breaker_errors: int) -> Fleet:
        config = SchedulerConfig(
            breaker_errors=breaker_errors, breaker_pause_s=8.0, batch_tokens=0, max_attempts=100
        )
        fleet = Fleet(seed, config)
        fleet.bad, fleet.fault = {bad}, fault
        run(fleet, 60)
        return fleet

    fleet, without = played(3), played(0)
    assert fleet.ended == {f"r{number}": "finished" for number in range(60)}
    assert bad in fleet.opened
    assert not without.opened
    assert fleet.errors < without.errors / 2, (fleet.errors, without.errors)


@pytest.mark.parametrize("seed", seeds(2, 6))
@pytest.mark.parametrize("bad", ["p0", "d2"])
def test_a_repaired_instance_takes_work_again(bad: str, seed: int) -> None:
    fleet = Fleet(
        seed,
        SchedulerConfig(breaker_errors=2, breaker_pause_s=1.0, batch_tokens=0, max_attempts=100),
    )
    fleet.bad = {bad}
    run(fleet, 20)
    assert fleet.bench.machine.breakers.state(bad) != "closed"
    fleet.bad = set()
    for number in range(100):
        fleet.submit(f"s{number}")
        fleet.tick()
    assert fleet.bench.machine.breakers.open == 0


@pytest.mark.parametrize("seed", seeds(2, 6))
def test_a_poison_opens_no_breaker(seed: int) -> None:
    fleet = Fleet(seed, SchedulerConfig(breaker_errors=2, batch_tokens=0), poison=("r5",))
    run(fleet, 20)
    assert "out of luck" in fleet.ended.pop("r5")
    assert set(fleet.ended.values()) == {"finished"}
    assert len(fleet.ended) == 19
    assert not fleet.opened


@pytest.mark.parametrize("seed", seeds(2, 6))
def test_bad_requests_leave_instances_for_good_ones(seed: int) -> None:
    fleet = Fleet(seed, SchedulerConfig(breaker_errors=2, breaker_pause_s=60.0, batch_tokens=0))
    fleet.poison = {f"r{number}" for number in range(60) if number % 4}
    fleet.poison_fault = "compute"  # is not tried again
    run(fleet, 60)
    good = {name: end for name, end in fleet.ended.items() if name not in fleet.poison}
    assert good == {f"r{number}": "finished" for number in range(0, 60, 4)}
    assert len(fleet.opened) == 1


def test_requests_outlive_a_time_in_which_every_instance_errs() -> None:
    config = SchedulerConfig(
        breaker_errors=1, breaker_pause_s=1.0, batch_tokens=0, max_attempts=100
    )
    fleet = Fleet(0, config)
    fleet.bad = {*PREFILL, *DECODE}
    for number in range(10):
        fleet.submit(f"r{number}")
    for _ in range(20):
        fleet.tick()
    assert fleet.bench.machine.breakers.open > 0
    assert not fleet.ended
    fleet.bad = set()
    for _ in range(200):
        fleet.tick()
    assert fleet.ended == {f"r{number}": "finished" for number in range(10)}
    assert not fleet.bench.machine.requests


def test_the_end_of_an_instance_explains_no_forgotten_errors_of_others() -> None:
    cards = [instance(name, pages=10_000) for name in (*PREFILL, "p2", "d0")]
    bench = Bench(*cards, config=SchedulerConfig(breaker_errors=2, batch_tokens=0))
    for name in ("a", "b", "c"):
        bench.submit(name)  # to p0, p1 and p2
    bench.failed("p0", "a", fault="transfer")
    bench.failed("p1", "b", fault="transfer")
    assert bench.machine.breakers.state("d0") == "open"
    bench.step(instance("d1", pages=10_000))
    for number in range(MOST_ERRORS):
        bench.submit(f"r{number}", new=1)
        bench.failed("d1", f"r{number}", fault="compute", retryable=False)
    bench.failed("p2", "c", fault="transfer")
    bench.died("p2")
    assert bench.machine.breakers.state("d0") == "open"
    bench.died("d0")
    assert bench.machine.breakers.open == 0


def spread_fleet() -> tuple[Bench, str]:
    """Returns a fleet whose requests are spread over d0 and a KVP worker, and the KVP worker whose
    breaker is half-open after two errors.
    """
    config = SchedulerConfig(
        max_kv_tokens_per_worker=320,
        breaker_errors=2,
        breaker_pause_s=1.0,
        isolation_s=5.0,
        batch_tokens=0,
    )
    cards = [instance("p0", pages=10_000, context=100_000)]
    cards += [instance(name, pages=100, context=100_000) for name in ("d0", "k0", "k1")]
    bench = Bench(*cards, config=config)
    for name in ("a", "b"):
        bench.submit(name, 400, 20)
        bench.failed("k0", name, fault="compute", retryable=False)
        for one in ("k0", "d0", "p0"):
            bench.released(one, name)
    assert bench.machine.breakers.state("k0") == "open"
    return bench, "k0"


def worker_of(bench: Bench, name: str) -> str:
    """Submits a request that is spread; returns its KVP worker."""
    found = bench.submit(name, 400, 20)
    (admitted,) = [one for one in found if isinstance(one, effects.AdmitDecode)]
    return admitted.shards[1].worker_id


def decode(bench: Bench, name: str) -> None:
    bench.chunk_started("p0", name)
    bench.computed("p0", name)
    bench.released("p0", name, complete=True)
    bench.decoding("d0", name)


def test_a_kvp_worker_is_cleared_by_the_last_token_of_its_probe() -> None:
    bench, worker = spread_fleet()
    assert worker_of(bench, "c") == "k1"
    bench.tick(1.0)
    assert bench.machine.breakers.state(worker) == "half_open"
    assert worker_of(bench, "probe") == worker  # the freer of the two
    decode(bench, "probe")
    assert (
        bench.machine.breakers.state(worker) == "half_open"
    )  # KV that has landed proves no engine
    bench.finished("d0", "probe")
    assert bench.machine.breakers.state(worker) == "closed"


def test_a_kvp_worker_is_cleared_by_a_probe_that_decodes_for_long() -> None:
    bench, worker = spread_fleet()
    bench.tick(1.0)
    assert worker_of(bench, "probe") == worker
    decode(bench, "probe")
    bench.tick(4.0)
    assert bench.machine.breakers.state(worker) == "half_open"
    bench.tick(1.0)
    assert bench.machine.breakers.state(worker) == "closed"


def test_a_kvp_worker_whose_probe_fails_pauses_for_twice_as_long() -> None:
    bench, worker = spread_fleet()
    bench.tick(1.0)
    assert worker_of(bench, "probe") == worker
    bench.failed(worker, "probe", fault="compute", retryable=False)
    bench.tick(1.0)
    assert bench.machine.breakers.state(worker) == "open"
    bench.tick(1.0)
    assert bench.machine.breakers.state(worker) == "half_open"
