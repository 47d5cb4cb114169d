"""How coroutines that run side by side end together."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import uvloop

from millrace.concurrency import (
    Patience,
    all_or_first_error,
    beside,
    cancel,
    interruptible,
    stop_event,
    stop_signals,
    until_one_ends,
)


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


@pytest.mark.parametrize("error", [None, ValueError("broken")])
async def test_one_end_is_the_end_of_all(error) -> None:
    first, ending, last = Work(), Work(error), Work()
    ending.released.set()
    both = until_one_ends(first.run(), ending.run(), last.run())
    if error is None:
        await both
    else:
        with pytest.raises(ValueError, match="broken"):
            await both
    assert [first.ended, last.ended] == ["cancelled", "cancelled"]


async def test_work_beside_a_block_ends_with_it() -> None:
    work = Work()
    async with beside(work.run()):
        await work.begun.wait()
        assert not work.ended
    assert work.ended == "cancelled"


async def test_an_error_beside_a_block_is_raised_after_it() -> None:
    failing, passed = Work(ValueError("broken")), False
    failing.released.set()
    with pytest.raises(ValueError, match="broken"):
        async with beside(failing.run()):
            await failing.begun.wait()
            await asyncio.sleep(0)
            passed = True
    assert passed


async def test_the_error_of_the_block_comes_first() -> None:
    work = Work()
    with pytest.raises(KeyError):
        async with beside(work.run()):
            await work.begun.wait()
            raise KeyError
    assert work.ended == "cancelled"


@pytest.mark.usefixtures("hears_hangup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_signals_stop_until_they_are_given_back(number) -> None:
    before = signal.getsignal(number)
    with stop_signals() as stop:
        os.kill(os.getpid(), number)
        await stop.wait()
    assert signal.getsignal(number) in (before, signal.SIG_DFL, signal.default_int_handler)


async def test_a_stop_event_is_not_set_before_a_signal() -> None:
    with stop_signals():  # gives the signals back
        stop = stop_event()
        assert not stop.is_set()
        os.kill(os.getpid(), signal.SIGTERM)
        await stop.wait()


async def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_signals() as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            os.kill(os.getpid(), signal.SIGTERM)
            await stop.wait()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("hears_hangup")
@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signals_cancel_interruptible_work(number, new_loop) -> None:
    work = Work()

    async def interrupted() -> None:
        asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), number)
        await interruptible(work.run())

    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(interrupted())
    assert work.ended == "cancelled"
    assert signal.getsignal(number) == before


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_work_that_computes_is_interrupted_where_it_is(new_loop) -> None:
    ended = []

    async def compute() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            while True:
                pass
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    with pytest.raises(KeyboardInterrupt), asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(interruptible(compute()))
    assert ended == ["cleaned up"]


def test_a_second_signal_ends_a_clean_up() -> None:
    begun = []

    async def clean_up_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            begun.append("clean up")
            asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()

    async def twice() -> None:
        asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.SIGINT)
        await interruptible(clean_up_for_ever())

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(twice())
    assert begun == ["clean up"]


async def test_interruptible_work_returns_and_raises() -> None:
    async def seven() -> int:
        return 7

    assert await interruptible(seven()) == 7
    failing = Work(ValueError("broken"))
    failing.released.set()
    with pytest.raises(ValueError, match="broken"):
        await interruptible(failing.run())


def test_a_child_leaves_the_terminal_to_its_parent() -> None:
    program = (
        "import os, signal; from millrace.concurrency import leave_terminal_to_parent as leave; "
        "leave(); [os.kill(os.getpid(), n) for n in (signal.SIGINT, signal.SIGHUP)]"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


async def test_patience_ends() -> None:
    forever = asyncio.Event()
    with pytest.raises(TimeoutError):
        async with Patience(0.01):
            await forever.wait()
    async with Patience(0.01):
        pass
    await asyncio.sleep(0.02)  # the limit of a block that has ended harms nobody


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_patience_lets_no_time_pass_in_which_this_process_did_not_run(new_loop) -> None:
    """What came in the meantime is read first, though both are due."""

    async def wait() -> None:
        near, far = socket.socketpair()
        with near:
            reader, writer = await asyncio.open_connection(sock=far)
            async with Patience(0.2):
                reading = asyncio.ensure_future(reader.readexactly(1))
                await asyncio.sleep(0)
                for _ in range(10):
                    time.sleep(0.3)  # noqa: ASYNC251 - the process is stopped
                    await asyncio.sleep(0)
                near.send(b"x")
                time.sleep(0.3)  # noqa: ASYNC251
                assert await reading == b"x"
            writer.close()

    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(wait())


def test_no_code_waits_by_wait_for() -> None:
    """With Python 3.11, it loses a cancellation that comes as the awaited work ends: who then waits
    for the cancelled task waits for ever. `asyncio.timeout` doesn't."""
    root = Path(__file__).parents[1]
    files = [f for part in ("services", "operator", "kernels") for f in (root / part).rglob("*.py")]
    assert len(files) > 500
    assert [f for f in files if "asyncio.wait_for(" in f.read_text(encoding="utf-8")] == []
