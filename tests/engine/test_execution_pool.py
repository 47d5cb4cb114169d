"""The execution pool: one task at a time, the first in order, suspended and resumed as ordered."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager

import pytest
import torch

from millrace.engine.execution_pool import ChunkTask, ExecutionPool, StopPoint, TaskDropped
from support.deadlines import HANG_S

CPU = torch.device("cpu")
LAYERS = 3
PASS = (*(StopPoint.OPERATOR, StopPoint.OPERATOR, StopPoint.LAYER) * LAYERS,)


class WatchedTask(ChunkTask):
    """Writes its events into the log of `watched`."""

    def __init__(self, watched: Watched, name: str, steps: Generator[StopPoint]) -> None:
        super().__init__(name, steps)
        self.watched = watched
        self.wanted = lambda: True

    def resumed(self) -> None:
        self.watched.log.append(f"run {self.name}")

    def suspended(self) -> None:
        self.watched.log.append(f"leave {self.name}")

    def ended(self, error: Exception | None) -> None:
        self.watched.log.append(f"end {self.name}")
        self.watched.ends[self.name] = error

    def is_unwanted(self) -> bool:
        return not self.wanted()


class Watched:
    """Tasks whose steps wait for the test; `log` has the events, in order."""

    def __init__(self, pool: ExecutionPool) -> None:
        self.pool = pool
        self.log: list[str] = []
        self.steps: dict[str, int] = {}
        self.active = 0
        self.ends: dict[str, Exception | None] = {}
        self.turn = threading.Semaphore(0)  # a step of any task takes one
        self.free = False

    def task(self, name: str, passes: int = 1, *, fails_at: int = -1) -> WatchedTask:
        def steps() -> Generator[StopPoint]:
            for _ in range(passes):
                for boundary in (*PASS, StopPoint.PASS):
                    self.active += 1
                    assert self.active == 1, "two tasks run"
                    if not self.free:
                        assert self.turn.acquire(timeout=HANG_S)
                    if self.steps[name] == fails_at:
                        self.active -= 1
                        raise ArithmeticError(name)
                    self.steps[name] += 1
                    self.active -= 1
                    yield boundary

        self.steps[name] = 0
        return WatchedTask(self, name, steps())

    def submit(
        self, name: str, passes: int = 1, *, fails_at: int = -1, joins_tokens: int = 0
    ) -> WatchedTask:
        task = self.task(name, passes, fails_at=fails_at)
        task.joins_tokens = joins_tokens
        self.pool.submit(task)
        return task

    def go(self, steps: int) -> None:
        self.turn.release(steps)

    def until(self, what: Callable[[], bool]) -> None:
        limit_s = time.monotonic() + HANG_S
        while not what():
            assert time.monotonic() < limit_s, self.log
            time.sleep(0.001)

    def did(self, entry: str) -> None:
        self.until(lambda: entry in self.log)


@contextmanager
def watched(finest: StopPoint, most_held: int = 8) -> Iterator[Watched]:
    blocked: list[float] = []
    pool = ExecutionPool(CPU, most_held=most_held, blocked=blocked.append)
    pool.set_granularity(finest)
    found = Watched(pool)
    found.blocked = blocked  # type: ignore[attr-defined] # the test's
    try:
        yield found
    finally:
        found.free = True
        found.go(1000)
        pool.close()
    assert found.active == 0


@pytest.mark.parametrize(
    ("granularity", "stops_after"), [("operator", 2), ("layer", 3), ("chunk", 10), ("none", 20)]
)
def test_a_task_is_left_at_the_next_boundary_of_the_granularity(
    granularity: str, stops_after: int
) -> None:
    with watched(StopPoint.of(granularity)) as w:
        w.pool.order(["urgent", "long"])
        w.submit("long", passes=2)
        w.did("run long")
        w.go(1)
        w.until(lambda: w.steps["long"] == 1)
        w.submit("urgent")
        w.go(stops_after - 1 + 10)
        w.did("end urgent")
        assert w.steps["long"] == stops_after
        w.go(1000)
        w.did("end long")
        assert w.steps == {"long": 20, "urgent": 10}
        preempted = ["leave long", "run urgent", "end urgent", "run long", "end long"]
        plain = ["end long", "run urgent", "end urgent"]
        assert w.log == ["run long", *(plain if granularity == "none" else preempted)]


def test_blocking_is_measured_from_the_signal_to_its_effect() -> None:
    with watched(StopPoint.OPERATOR) as w:
        w.pool.order(["urgent", "long"])
        w.submit("long")
        w.did("run long")
        w.submit("urgent")
        time.sleep(0.05)
        w.go(11)
        w.did("end urgent")
        (seconds,) = w.blocked  # type: ignore[attr-defined]
        assert 0.05 <= seconds < HANG_S


def test_a_signal_that_is_taken_back_stops_nothing() -> None:
    with watched(StopPoint.OPERATOR) as w:
        w.pool.order(["urgent", "long"])
        w.submit("long")
        w.did("run long")
        w.submit("urgent")
        w.pool.order(["long", "urgent"])
        w.go(1000)
        w.did("end urgent")
        assert w.log == ["run long", "end long", "run urgent", "end urgent"]
        assert not w.blocked  # type: ignore[attr-defined]


def test_suspended_passes_are_bounded_and_the_one_that_runs_ends_its_pass() -> None:
    with watched(StopPoint.OPERATOR, most_held=2) as w:
        w.pool.order("dcba")
        w.submit("a", passes=2)
        for name, following in ("ab", "bc", "cd"):
            w.did(f"run {name}")
            w.go(1)
            w.until(lambda name=name: w.steps[name] == 1)
            w.submit(following, passes=2)
            w.go(1)
        # a and b are held in the middle of a pass; c may not be, and continues to its pass's end.
        w.go(8)
        w.did("run d")
        assert w.steps == {"a": 2, "b": 2, "c": 10, "d": 0}
        assert (w.pool.held, w.pool.suspended) == (2, 3)


def test_a_failing_task_ends_with_its_error_and_the_next_one_goes_on() -> None:
    with watched(StopPoint.OPERATOR) as w:
        w.submit("bad", fails_at=4)
        w.submit("good")
        w.go(1000)
        w.did("end good")
        assert isinstance(w.ends["bad"], ArithmeticError)
        assert w.ends["good"] is None


def test_what_nobody_wants_is_ended_though_another_runs_that_yields_to_none() -> None:
    with watched(StopPoint.END) as w:
        w.submit("long")
        w.did("run long")
        waiting = w.submit("waiting")
        waiting.wanted = lambda: False
        w.pool.drop_unwanted()
        w.go(1)
        w.did("end waiting")
        assert isinstance(w.ends["waiting"], TaskDropped)
        assert "end long" not in w.log


def test_the_pool_takes_a_name_once() -> None:
    with watched(StopPoint.END) as w:
        w.submit("a")
        with pytest.raises(ValueError, match="'a'"):
            w.pool.submit(w.task("a"))


def test_what_has_not_begun_can_be_taken_out() -> None:
    with watched(StopPoint.END) as w:
        w.submit("a")
        w.did("run a")
        waiting = w.submit("b", joins_tokens=5)
        assert w.pool.take(["a", "b", "none"], 10) == [waiting]
        w.go(1000)
        w.did("end a")
        assert w.steps["b"] == 0


def test_those_that_fit_are_taken_out_in_the_order_of_their_names() -> None:
    with watched(StopPoint.END) as w:
        w.submit("a")
        w.did("run a")
        sizes = {"b": 4, "c": 7, "d": 6, "e": 1}
        tasks = {name: w.submit(name, joins_tokens=size) for name, size in sizes.items()}
        w.submit("alone")
        names = ["alone", "d", "c", "b", "e"]
        assert w.pool.take(names, 10) == [tasks["d"], tasks["b"]]
        assert w.pool.take(names, 7) == [tasks["c"]]
        w.go(1000)
        w.did("end e")
        assert (w.steps["b"], w.steps["c"], w.steps["d"]) == (0, 0, 0)


def test_tasks_run_in_inference_mode() -> None:
    """What one thread makes in this mode, a thread in another can't write."""
    modes = []

    def steps() -> Generator[StopPoint]:
        for _ in range(2):
            modes.append(torch.is_inference_mode_enabled())
            yield StopPoint.PASS

    with watched(StopPoint.OPERATOR) as w:
        w.pool.submit(WatchedTask(w, "a", steps()))
        w.did("run a")
        w.did("end a")
    assert modes == [True, True]


@pytest.mark.parametrize("seed", range(6))
def test_under_random_orders_every_step_runs_once_and_nothing_is_lost(seed: int) -> None:
    draw = random.Random(seed)
    finest = draw.choice([StopPoint.OPERATOR, StopPoint.LAYER, StopPoint.PASS])
    with watched(finest, most_held=draw.randint(1, 4)) as w:
        w.free = True
        names = [f"t{i}" for i in range(40)]
        unwanted: set[str] = set()
        for i, name in enumerate(names):
            task = w.task(name, passes=draw.randint(1, 6))
            task.wanted = lambda name=name: name not in unwanted
            w.pool.submit(task)
            w.pool.order(draw.sample(names, len(names)))
            if draw.random() < 0.2:
                unwanted.add(draw.choice(names[: i + 1]))
                w.pool.drop_unwanted()
            if draw.random() < 0.3:
                time.sleep(0.001)
        w.until(lambda: len(w.ends) == len(names))
        for name, error in w.ends.items():
            if error is None:
                assert w.steps[name] % 10 == 0
            else:
                assert isinstance(error, TaskDropped)
                assert name in unwanted
        begun = [entry for entry in w.log if entry.startswith("run")]
        left = [entry for entry in w.log if entry.startswith("leave")]
        never = sum(f"run {name}" not in w.log for name in names)
        assert len(begun) + never >= len(names)
        assert len(left) < len(begun)
        assert w.pool.suspended == w.pool.held == 0
