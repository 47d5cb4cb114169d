"""ScriptRunner: callers share only round trips."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import RedisError, ResponseError

from millrace.state.redis import scripts
from millrace.state.redis.scripts import Script, ScriptCall, ScriptRunner
from support.deadlines import HANG_S
from support.stores import private_redis

APPEND = Script("return redis.call('APPEND', KEYS[1], ARGV[1])")
FAIL = Script("return redis.call('LPUSH', KEYS[1], ARGV[1])")  # of a string: WRONGTYPE
SLOW = Script("for i = 1, 2e7 do end return 1")


@pytest.fixture
async def client() -> AsyncIterator[Redis]:
    async with private_redis() as url, Redis.from_url(url) as client:
        yield client


def runner_of(client: Redis) -> ScriptRunner:
    return ScriptRunner(client, lambda _: 2 * HANG_S)


def append(text: bytes) -> ScriptCall:
    return ScriptCall(APPEND, (b"k",), (text,))


def round_trips(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Notes the number of calls of each round trip from now on."""
    trips: list[int] = []
    send = AbstractConnection.send_packed_command

    async def counted(connection: AbstractConnection, pieces: list[bytes], **options: bool) -> None:
        calls = b"".join(pieces).count(b"EVALSHA")
        if calls:
            trips.append(calls)
        await send(connection, pieces, **options)

    monkeypatch.setattr(AbstractConnection, "send_packed_command", counted)
    return trips


async def test_answers_find_their_callers_in_order(client: Redis) -> None:
    runner = runner_of(client)
    results = await asyncio.gather(
        runner.run([append(b"a"), append(b"b")]),
        runner.run([]),
        runner.run([append(b"c")]),
        *(runner.run([append(b"d")]) for _ in range(50)),
    )
    assert results == [[1, 2], [], [3], *([4 + i] for i in range(50))]
    assert await client.get("k") == b"abc" + b"d" * 50


async def test_callers_share_round_trips(client: Redis, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = runner_of(client)
    await runner.run([append(b"a")])
    trips = round_trips(monkeypatch)
    await asyncio.gather(*(runner.run([append(b"a")]) for _ in range(100)))
    assert trips == [100]
    monkeypatch.setattr(scripts, "MAX_BATCH_CALLS", 30)
    await asyncio.gather(*(runner.run([append(b"a")]) for _ in range(100)))
    assert trips == [100, 30, 30, 30, 10]


async def test_one_callers_failure_is_its_own(client: Redis) -> None:
    runner = runner_of(client)
    first, failed, last = await asyncio.gather(
        runner.run([append(b"a")]),
        runner.run([append(b"b"), ScriptCall(FAIL, (b"k",), (b"x",))]),
        runner.run([append(b"c")]),
        return_exceptions=True,
    )
    assert (first, last) == ([1], [3])
    assert isinstance(failed, ResponseError) and "WRONGTYPE" in str(failed)


async def test_a_callers_end_is_its_own(client: Redis) -> None:
    runner = runner_of(client)
    tasks = [asyncio.create_task(runner.run([append(b"a")])) for _ in range(10)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, asyncio.CancelledError) for result in results[::2])
    assert results[1::2] == [[1], [2], [3], [4], [5]]  # those of the others were never sent


async def test_large_groups_do_not_hold_up_small_ones(
    client: Redis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts, "LARGE_BYTES", 100)
    runner = runner_of(client)
    await runner.run([append(b"x")])
    trips = round_trips(monkeypatch)
    await asyncio.gather(*(runner.run([append(b"x" * count)]) for count in (1, 101, 1)))
    assert sorted(trips) == [1, 2]


async def test_a_lost_server_fails_every_waiting_caller(client: Redis) -> None:
    runner = runner_of(client)
    tasks = [asyncio.create_task(runner.run([append(b"a")])) for _ in range(5)]
    await asyncio.sleep(0)
    await client.shutdown(nosave=True)
    async with asyncio.timeout(HANG_S):
        late = await asyncio.gather(runner.run([append(b"a")]), *tasks, return_exceptions=True)
    assert isinstance(late[0], RedisError)
    await runner.close()


async def test_close_waits_for_what_is_under_way(client: Redis) -> None:
    runner = runner_of(client)
    task = asyncio.create_task(runner.run([ScriptCall(SLOW, (b"k",), ())]))
    await asyncio.sleep(0)
    await runner.close()
    assert task.done() or await asyncio.wait_for(task, HANG_S) == [1]


async def test_a_silent_server_ends_the_round_trip_and_not_the_next_one(client: Redis) -> None:
    limits = iter([0.05, 2 * HANG_S])
    runner = ScriptRunner(client, lambda _: next(limits))
    pid = (await client.info("server"))["process_id"]
    os.kill(pid, signal.SIGSTOP)
    first = asyncio.create_task(runner.run([append(b"a")]))
    await asyncio.sleep(0)
    second = asyncio.create_task(runner.run([append(b"b")]))
    with pytest.raises(TimeoutError):
        await first
    os.kill(pid, signal.SIGCONT)
    assert (await second)[0] in (1, 2)  # the first may have run, too late
    await runner.close()
