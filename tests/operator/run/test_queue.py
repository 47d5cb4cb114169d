"""The work queue's guarantees, with short times."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest

from millrace.core.backoff import Backoff
from millrace.core.errors import MillraceError
from millrace_operator.run.kube import KubeError
from millrace_operator.run.queue import Key, Pace, WorkQueue
from support.deadlines import HANG_S

A, B = Key("DecodePool", "default", "a"), Key("DecodePool", "default", "b")
RETRY = Backoff(0.02, 0.08, spread=0.0)
QUICK = Pace(gap_s=0.0, retry=RETRY, event_retry_s=0.05, jitter=0.0)


@asynccontextmanager
async def running(
    reconcile: Callable[[Key], Awaitable[float | None]], pace: Pace = QUICK, workers: int = 4
) -> AsyncIterator[WorkQueue]:
    queue = WorkQueue(reconcile, workers=workers, pace=pace)
    task = asyncio.create_task(queue.run())
    try:
        yield queue
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(HANG_S):
        while True:
            if true():
                return
            await asyncio.sleep(0.001)


class Recorder:
    """Records when each key is reconciled; `answers` are given in turn, the last one for ever."""

    def __init__(self, *answers: float | Exception | None) -> None:
        self.answers = list(answers)
        self.looks: list[tuple[Key, float]] = []
        self.looked = asyncio.Condition()

    async def __call__(self, key: Key) -> float | None:
        self.looks.append((key, asyncio.get_running_loop().time()))
        async with self.looked:
            self.looked.notify_all()
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def until(self, count: int) -> list[float]:
        """Returns the seconds between passes, after `count` passes."""
        async with asyncio.timeout(HANG_S), self.looked:
            await self.looked.wait_for(lambda: len(self.looks) >= count)
        times = [at_s for _, at_s in self.looks]
        return [after - before for before, after in pairwise(times)]


async def test_touches_before_and_during_a_look_count_as_one():
    begun, go = asyncio.Event(), asyncio.Event()
    looks: list[Key] = []

    async def look(key: Key) -> None:
        looks.append(key)
        begun.set()
        await go.wait()

    async with running(look) as queue:
        for _ in range(5):
            queue.touch(A)
        await begun.wait()
        for _ in range(5):
            queue.touch(A)
        await asyncio.sleep(0.01)
        assert looks == [A]  # never twice at once
        go.set()
        queue.touch(B)
        await until(lambda: B in looks and looks.count(A) == 2)
        assert looks.count(A) == 2


async def test_no_more_than_so_many_at_once():
    go, most, now = asyncio.Event(), 0, 0

    async def look(key: Key) -> None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await go.wait()
        now -= 1

    async with running(look, workers=2) as queue:
        for name in "abcdef":
            queue.touch(A._replace(name=name))
        await asyncio.sleep(0.02)
        assert (most, queue.waiting()) == (2, 4)
        go.set()
        await until(lambda: not queue.waiting() and not now)
        assert most == 2


async def test_it_looks_again_when_asked_to_and_forgets_what_is_gone():
    recorder = Recorder(0.02, 0.02, None)
    async with running(recorder) as queue:
        queue.touch(A)
        gaps = await recorder.until(3)
        assert all(gap >= 0.02 for gap in gaps)
        await asyncio.sleep(0.05)
        assert len(recorder.looks) == 3
        queue.touch(A)
        await recorder.until(4)


@pytest.mark.parametrize("error", [KubeError("later"), MillraceError("wrong"), ZeroDivisionError()])
async def test_failures_are_tried_again_ever_later(error: Exception):
    recorder = Recorder(error)
    async with running(recorder) as queue:
        queue.touch(A)
        gaps = await recorder.until(5)
    for gap, least in zip(gaps, [0.02, 0.04, 0.08, 0.08], strict=True):
        assert gap >= least


async def test_a_success_ends_the_failures():
    recorder = Recorder(KubeError("x"), KubeError("x"), 0.0, KubeError("x"), 60.0)
    async with running(recorder) as queue:
        queue.touch(A)
        gaps = await recorder.until(5)
    assert gaps[1] >= 0.04 and gaps[3] >= 0.02


async def test_an_event_shortens_a_wait_but_not_one_that_was_asked_for():
    retry = Backoff(5.0, 5.0, spread=0.0)
    slow = Pace(gap_s=0.0, retry=retry, event_retry_s=0.03, jitter=0.0)
    recorder = Recorder(MillraceError("x"), KubeError("x", status=429, retry_after_s=0.1), 60.0)
    async with running(recorder, slow) as queue:
        queue.touch(A)
        await recorder.until(1)
        queue.touch(A)
        await recorder.until(2)
        queue.touch(A)
        gaps = await recorder.until(3)
    assert 0.03 <= gaps[0] < 5.0 and 0.1 <= gaps[1] < 5.0


async def test_events_that_a_look_causes_can_not_make_it_spin():
    """Each pass touches its own object: the gap limits the rate."""
    queue: WorkQueue

    async def look(key: Key) -> float:
        queue.touch(key)
        await recorder(key)
        return 60.0

    recorder = Recorder(None)
    async with running(look, Pace(gap_s=0.03)) as queue:
        queue.touch(A)
        gaps = await recorder.until(4)
    assert all(gap >= 0.03 for gap in gaps)
