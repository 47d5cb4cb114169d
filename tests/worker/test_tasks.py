"""Background tasks: none fails unheard."""

import asyncio

import pytest

from millrace.worker.tasks import Tasks


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
        async with asyncio.timeout(1):
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
