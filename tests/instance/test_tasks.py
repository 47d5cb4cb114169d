"""Background tasks: every failure is raised."""

import asyncio
from types import SimpleNamespace

import pytest

from millrace.instance.tasks import Tasks, awaited_frames, place_of, stacks
from support.deadlines import HANG_S


async def test_the_first_failure_ends_the_watch() -> None:
    tasks = Tasks()

    async def fail(text: str) -> None:
        await asyncio.sleep(0)
        raise KeyError(text)

    watching = asyncio.create_task(tasks.watch())
    tasks.spawn(asyncio.sleep(60))
    tasks.spawn(fail("first"))
    tasks.spawn(fail("second"))

    with pytest.raises(KeyError, match="first"):
        async with asyncio.timeout(HANG_S):
            await watching
    await tasks.cancel()


async def test_a_failure_before_the_watch_is_heard_too() -> None:
    tasks = Tasks()

    async def fail() -> None:
        raise ValueError("early")

    tasks.spawn(fail())
    await asyncio.sleep(0.01)
    with pytest.raises(ValueError, match="early"):
        await tasks.watch()


async def test_cancel_waits_for_what_ends() -> None:
    tasks, ended = Tasks(), []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            ended.append(True)

    tasks.spawn(work())
    await asyncio.sleep(0)
    await tasks.cancel()

    assert ended == [True]


async def test_stacks_show_where_tasks_and_threads_wait() -> None:
    never = asyncio.Event()

    async def inner() -> None:
        await never.wait()

    async def outer() -> None:
        await inner()

    task = asyncio.create_task(outer(), name="the task")
    await asyncio.sleep(0)
    shown = stacks()
    own = shown[shown.index("the task") :].splitlines()
    assert [line.split()[-1] for line in own[1:4]] == ["outer", "inner", "wait"]
    assert "thread MainThread" in shown and "test_stacks_show" in shown
    task.cancel()


async def test_stacks_go_on_below_what_compiled_code_awaits() -> None:
    """gRPC awaits a handler's coroutine in a wrapper, which does not name the coroutine."""

    async def handler() -> None:
        await asyncio.Event().wait()

    coroutine = handler()
    wrapper = coroutine.__await__()
    next(wrapper)
    assert [frame.f_code.co_name for frame in awaited_frames(wrapper)] == ["handler", "wait"]
    coroutine.close()


async def test_stacks_of_compiled_frames_have_no_line() -> None:
    """A compiled event loop has such frames; the log must not fail on them."""

    class Compiled:
        cr_frame = SimpleNamespace(
            f_code=SimpleNamespace(co_filename="loop.pyx", co_name="run"), f_lineno=None
        )

    assert [place_of(frame) for frame in awaited_frames(Compiled())] == ["  loop.pyx:None run"]
