"""Gangs across execution pools that run: threads, slow links, orders that come late."""

from __future__ import annotations

import heapq
import random
import threading
import time
from collections.abc import Callable, Generator
from functools import partial
from itertools import count

import pytest
import torch

from millrace.core.instance.gang import GangKey, GangSpec
from millrace.core.instance.stop_point import StopPoint
from millrace.engine.execution_pool import ChunkTask, ExecutionPool, TaskDropped
from support.deadlines import HANG_S

CPU = torch.device("cpu")


class Links:
    """Carries payloads between pools, and orders to them: slowly, and in order on each link."""

    def __init__(self, draw: random.Random, slowest_s: float) -> None:
        self._draw, self._slowest_s = draw, slowest_s
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._last_s: dict[tuple[str, str], float] = {}
        self._numbers = count()
        self._changed = threading.Condition()
        self._closing = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def carry(self, sender: str, to: str, what: Callable[[], None]) -> None:
        with self._changed:
            at_s = time.monotonic() + self._draw.random() ** 3 * self._slowest_s
            at_s = self._last_s[sender, to] = max(at_s, self._last_s.get((sender, to), 0.0))
            heapq.heappush(self._due, (at_s, next(self._numbers), what))
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._closing:
                    return
                wait_s = self._due[0][0] - time.monotonic() if self._due else None
                if wait_s is None or wait_s > 0:
                    self._changed.wait(wait_s)
                    continue
                what = heapq.heappop(self._due)[2]
            what()


class Job:
    """A task on some pools. Each operator is a ring step: it ends nowhere before all began it."""

    def __init__(self, number: int, members: tuple[str, ...], stops: bytes) -> None:
        self.name, self.members, self.stops = f"j{number}", members, stops
        self.key = GangKey(self.name, 1, 0)
        self.begun = dict.fromkeys(members, 0)
        self.left: dict[str, list[int]] = {member: [] for member in members}
        self.ends: dict[str, Exception | None] = {}
        self.cancelled = False
        self.changed = threading.Condition()

    def steps(self, me: str, fleet: Fleet) -> Generator[StopPoint]:
        for position in range(1, len(self.stops) + 1):
            with fleet.computes(me), self.changed:
                self.begun[me] = position
                self.changed.notify_all()
                came = self.changed.wait_for(
                    lambda position=position: (
                        self.cancelled or min(self.begun.values()) >= position
                    ),
                    HANG_S,
                )
                assert came, f"{me} waits in operator {position - 1} of {self.name}: {self.begun}"
            if position < len(self.stops):
                yield StopPoint(self.stops[position])

    def task(self, me: str, fleet: Fleet) -> ChunkTask:
        spec = GangSpec(
            key=self.key,
            members=self.members,
            me=me,
            stops=self.stops,
            last_stop=len(self.stops) - 1,
        )
        return JobTask(self, me, self.steps(me, fleet), spec if len(self.members) > 1 else None)


class JobTask(ChunkTask):
    """A job's task at one member."""

    def __init__(
        self, job: Job, me: str, steps: Generator[StopPoint], gang: GangSpec | None
    ) -> None:
        super().__init__(job.name, steps, gang)
        self.job, self.me = job, me

    def suspended(self) -> None:
        self.job.left[self.me].append(self.job.begun[self.me])

    def ended(self, error: Exception | None) -> None:
        self.job.ends[self.me] = error

    def is_unwanted(self) -> bool:
        return self.job.cancelled


class Fleet:
    def __init__(self, names: str, draw: random.Random, slowest_s: float = 0.004) -> None:
        self.links = Links(draw, slowest_s)
        self._busy = {name: threading.Lock() for name in names}
        self.pools = {
            name: ExecutionPool(
                CPU,
                most_held=draw.randint(0, 4),
                send=lambda to, what, me=name: self._send(me, to, what),
            )
            for name in names
        }

    def _send(self, sender: str, to: str, payload: bytes) -> None:
        self.links.carry(sender, to, lambda: self.pools[to].receive(sender, payload))

    def computes(self, name: str) -> _Alone:
        return _Alone(self._busy[name])

    def order(self, names: list[str]) -> None:
        for name, pool in self.pools.items():
            self.links.carry("scheduler", name, lambda pool=pool: pool.order(names))

    def close(self, jobs: list[Job]) -> None:
        for job in jobs:
            with job.changed:
                job.cancelled = True
                job.changed.notify_all()
        for pool in self.pools.values():
            pool.close()
        self.links.close()


class _Alone:
    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock

    def __enter__(self) -> None:
        assert self._lock.acquire(blocking=False), "two tasks at once"

    def __exit__(self, *raised: object) -> None:
        self._lock.release()


def wait_for(what: Callable[[], bool], told: Callable[[], object]) -> None:
    limit_s = time.monotonic() + HANG_S
    while not what():
        assert time.monotonic() < limit_s, told()
        time.sleep(0.001)


@pytest.mark.parametrize("seed", range(8))
def test_overlapping_gangs_end_under_preemptions_on_slow_links(seed: int) -> None:
    draw = random.Random(seed)
    names = "pqrs"
    fleet = Fleet(names, draw)
    for pool in fleet.pools.values():
        pool.set_granularity(draw.choice(list(StopPoint)[:3]))
    jobs: list[Job] = []
    cancelled: set[str] = set()
    try:
        for number in range(60):
            members = tuple(draw.sample(names, draw.randint(1, len(names))))
            stops = bytes(
                [StopPoint.PASS, *draw.choices(list(StopPoint)[:3], k=draw.randint(0, 60))]
            )
            jobs.append(job := Job(number, members, stops))
            fleet.order(draw.sample([j.name for j in jobs], len(jobs)))
            for me in members:
                submit = partial(fleet.pools[me].submit, job.task(me, fleet))
                fleet.links.carry("scheduler", me, submit)
            if draw.random() < 0.15:
                _cancel(fleet, draw.choice(jobs), cancelled)
            time.sleep(draw.random() * 0.01)
        wait_for(
            lambda: all(len(job.ends) == len(job.members) for job in jobs),
            lambda: [
                (j.name, j.members, j.begun, j.ends) for j in jobs if len(j.ends) < len(j.members)
            ],
        )
        for job in jobs:
            if job.name in cancelled:
                assert all(e is None or isinstance(e, TaskDropped) for e in job.ends.values()), (
                    job.ends
                )
                continue
            assert set(job.ends.values()) == {None}, job.ends
            assert set(job.begun.values()) == {len(job.stops)}
            assert len({tuple(left) for left in job.left.values()}) == 1, "stops differ"
        assert any(len(job.members) > 1 and any(job.left.values()) for job in jobs), "none stopped"
        for pool in fleet.pools.values():
            assert pool.held == pool.suspended == 0 and not pool.is_running
    finally:
        fleet.close(jobs)


def _cancel(fleet: Fleet, job: Job, cancelled: set[str]) -> None:
    cancelled.add(job.name)
    with job.changed:
        job.cancelled = True
        job.changed.notify_all()
    for me in job.members:
        fleet.links.carry("scheduler", me, fleet.pools[me].drop_unwanted)


def test_a_gang_that_one_member_lacks_delays_nothing() -> None:
    fleet = Fleet("pq", random.Random(0), slowest_s=0.0)
    gang, solo = Job(0, ("p", "q"), b"\2\0"), Job(1, ("q",), b"\2\0")
    try:
        fleet.pools["q"].order([gang.name, solo.name])
        fleet.pools["q"].submit(gang.task("q", fleet))
        fleet.pools["q"].submit(solo.task("q", fleet))
        wait_for(lambda: len(solo.ends) == 1, lambda: solo.begun)
        fleet.pools["p"].submit(gang.task("p", fleet))
        wait_for(lambda: len(gang.ends) == 2, lambda: gang.begun)
        assert set(gang.ends.values()) == {None}
    finally:
        fleet.close([gang, solo])


def test_a_pool_waits_for_the_gang_that_is_first_and_is_free_again_when_it_is_dropped() -> None:
    fleet = Fleet("pq", random.Random(0), slowest_s=0.0)
    gang, solo, long = Job(0, ("p", "q"), b"\2\0"), Job(1, ("q",), b"\2\0"), Job(2, ("p",), b"\2\0")
    long.begun["nobody"] = 0  # it stays in its first operator until it is cancelled
    try:
        for pool in fleet.pools.values():
            pool.order([gang.name, solo.name, long.name])
        fleet.pools["p"].submit(long.task("p", fleet))
        wait_for(lambda: long.begun["p"] == 1, lambda: long.begun)
        for me in gang.members:
            fleet.pools[me].submit(gang.task(me, fleet))
        wait_for(lambda: fleet.pools["q"].standstill() is not None, lambda: gang.begun)
        fleet.pools["q"].submit(solo.task("q", fleet))
        assert not solo.ends and not fleet.pools["q"].is_running
        gang.cancelled = True
        fleet.pools["q"].drop_unwanted()
        wait_for(lambda: len(solo.ends) == 1, lambda: solo.begun)
        assert isinstance(gang.ends["q"], TaskDropped)
    finally:
        fleet.close([gang, solo, long])


def test_a_gang_that_was_cancelled_just_before_it_comes_ends() -> None:
    """A chunk may follow its predecessor in the moment after the pool looked for unwanted tasks."""
    fleet = Fleet("pq", random.Random(0), slowest_s=0.0)
    gang = Job(0, ("p", "q"), b"\2\0")
    try:
        gang.cancelled = True
        fleet.pools["q"].drop_unwanted()
        fleet.pools["q"].submit(gang.task("q", fleet))
        wait_for(lambda: "q" in gang.ends, lambda: gang.begun)
        assert isinstance(gang.ends["q"], TaskDropped) and gang.begun["q"] == 0
    finally:
        fleet.close([gang])


def test_close_ends_a_member_that_holds_for_a_leader_that_is_silent() -> None:
    fleet = Fleet("pq", random.Random(0), slowest_s=0.0)
    gang, other = Job(0, ("p", "q"), bytes(400_000)), Job(1, ("q",), b"\2")
    for pool in fleet.pools.values():
        pool.set_granularity(StopPoint.OPERATOR)
        pool.order([other.name, gang.name])
    try:
        for me in gang.members:
            fleet.pools[me].submit(gang.task(me, fleet))
        wait_for(lambda: min(gang.begun.values()) > 10, lambda: gang.begun)
        fleet.links.close()  # from here on no message arrives
        fleet.pools["q"].submit(other.task("q", fleet))
    finally:
        started_s = time.monotonic()
        fleet.close([gang, other])
        assert time.monotonic() - started_s < HANG_S
    assert len(gang.ends) == 2 and other.begun["q"] == 0


def test_what_is_no_gangs_message_is_refused() -> None:
    fleet = Fleet("p", random.Random(0))
    try:
        with pytest.raises(Exception, match="not a gang's message"):
            fleet.pools["p"].receive("q", b"\1")
    finally:
        fleet.close([])
