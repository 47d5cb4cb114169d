"""How coroutines that run side by side end together."""

from __future__ import annotations

import asyncio

import pytest

from millrace.concurrency import all_or_first_error, cancel


class Work:
    """A coroutine that waits until it is released, and notes how it ended."""

    def __init__(self, error: Exception | None = None) -> None:
        self.begun, self.released = asyncio.Event(), asyncio.Event()
        self.ended = ""
        self._error = error

    async def run(self) -> None:
        self.begun.set()
        try:
            await self.released.wait()
            if self._error is not None:
                raise self._error
            self.ended = "returned"
        except asyncio.CancelledError:
            await asyncio.sleep(0)  # its clean-up takes another turn of the loop
            self.ended = "cancelled"
            raise


async def test_cancelled_tasks_have_ended_whatever_they_raise() -> None:
    work, failing, done = Work(), Work(ValueError("broken")), Work()
    tasks = [asyncio.create_task(one.run()) for one in (work, failing, done)]
    for one in (work, failing, done):
        await one.begun.wait()
    failing.released.set()
    done.released.set()
    await asyncio.wait(tasks[1:])
    await cancel(*tasks)
    assert (work.ended, done.ended) == ("cancelled", "returned")
    assert tasks[0].cancelled()
    assert str(tasks[1].exception()) == "broken"
    await cancel()  # no task is no error


async def test_all_are_waited_for() -> None:
    works = [Work(), Work()]
    for one in works:
        one.released.set()
    await all_or_first_error(one.run() for one in works)
    assert [one.ended for one in works] == ["returned", "returned"]


async def test_the_first_error_cancels_the_others_before_it_is_raised() -> None:
    waiting, failing = Work(), Work(ValueError("broken"))
    failing.released.set()
    with pytest.raises(ValueError, match="broken"):
        await all_or_first_error([waiting.run(), failing.run()])
    assert waiting.ended == "cancelled"
