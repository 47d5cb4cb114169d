"""The board's lines from a live scheduler, and that listeners never hold it up."""

from __future__ import annotations

import asyncio
import json

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.scheduler.machine import Machine
from millrace.scheduler.observe.board_feed import MAX_LISTENERS, MAX_WAITING, BoardFeed
from millrace.wire.clients.scheduler_client import SchedulerUnavailable, watch_board
from support.core_events import instance, request
from support.deadlines import HANG_S
from support.live_stack import eventually
from support.scheduler_peers import scheduler, spec


class Listener:
    """Reads a live scheduler's board; `until` waits for a line."""

    def __init__(self, address: str) -> None:
        self.parts = watch_board(address)
        self.lines: list[dict] = []

    async def until(self, kind: str, **fields: object) -> dict:
        def fits(line: dict) -> bool:
            return line.get("kind") == kind and fields.items() <= line.items()

        async with asyncio.timeout(HANG_S):
            while not (found := [line for line in self.lines if fits(line)]):
                part = await anext(self.parts)
                self.lines += map(json.loads, part.splitlines())
        return found[0]


async def test_listeners_follow_a_request_over_real_streams():
    async with scheduler() as net:
        prefill, decode = await net.worker("p0"), await net.worker("d0")
        first = Listener(net.address)
        assert (await first.until("instance", id="p0"))["kv_pages"] == 100
        assert first.lines[0].keys() == {"millrace_board", "source", "zero_unix_s"}
        proxy = await net.proxy()
        await proxy.submit(spec("r", 100))
        await first.until("planned", id="r")
        later = Listener(net.address)  # comes when the request is there
        assert (await later.until("arrived", id="r"))["since_s"] >= 0.0
        await prefill.computed("r")
        await prefill.released("r")
        await decode.decoding("r")
        await decode.finished("r")
        for listener in (first, later):
            assert (await listener.until("first_token", id="r"))["ttft_s"] > 0.0
            await listener.until("state", id="r", state="finished")
            await listener.parts.aclose()


async def test_the_end_of_the_scheduler_ends_the_stream():
    async with scheduler() as net:
        listener = Listener(net.address)
        await listener.until("fleet")
    with pytest.raises((StopAsyncIteration, SchedulerUnavailable)):
        async with asyncio.timeout(HANG_S):
            while True:
                await anext(listener.parts)


def taken(outbox) -> list[bytes]:
    async def take() -> list[bytes]:
        return await asyncio.wait_for(outbox.take(), HANG_S)

    return asyncio.run(take())


def step(machine: Machine, feed: BoardFeed, event: object, now_s: float) -> None:
    effects = machine.step(event, now_s)
    feed.saw(event, effects, now_s)


def test_a_slow_listener_is_dropped_with_the_reason_and_others_stay():
    machine = Machine(SchedulerConfig())
    feed = BoardFeed(machine)
    slow, quick = feed.watch(0.0), feed.watch(0.0)
    for number in range(MAX_WAITING):
        step(machine, feed, instance("d0", generation=number + 1), float(number))
        if number % 100 == 0:
            taken(quick)
    assert slow.closed and slow.failure == f"{MAX_WAITING} messages wait to be read"
    assert not quick.closed and taken(quick)


def test_nobody_pays_once_the_last_listener_has_left():
    machine = Machine(SchedulerConfig())
    feed = BoardFeed(machine)
    one, other = feed.watch(0.0), feed.watch(0.0)
    feed.leave(one)
    feed.leave(one)
    assert feed.outboxes == [other]
    feed.leave(other)
    step(machine, feed, instance("p0"), 1.0)
    assert feed.outboxes == [] and len(taken(other)) == 1  # what was there when it came


def test_there_is_a_most_of_listeners():
    feed = BoardFeed(Machine(SchedulerConfig()))
    for _ in range(MAX_LISTENERS):
        assert not feed.watch(0.0).closed
    assert feed.watch(0.0).failure == f"{MAX_LISTENERS} listeners watch the board already"
    assert len(feed.outboxes) == MAX_LISTENERS


def test_an_error_in_the_observation_ends_the_streams_alone(caplog):
    feed = BoardFeed(Machine(SchedulerConfig()))
    outbox = feed.watch(0.0)
    feed.saw(request("r"), [None, object()], 1.0)  # effects that nobody knows are ignored
    assert not outbox.closed
    feed.saw(request("s"), None, 1.0)  # no machine returns this
    assert "the board can't follow Submitted" in caplog.text
    assert outbox.closed and "see its log" in outbox.failure
    assert feed.outboxes == []


async def test_a_client_that_leaves_is_forgotten():
    async with scheduler() as net:
        listener = Listener(net.address)
        await listener.until("fleet")
        await listener.parts.aclose()
        others = [Listener(net.address) for _ in range(MAX_LISTENERS)]

        async def all_listen() -> bool:
            """Whether as many find room: the place of the one that left is free again."""
            try:
                for one in others:
                    await one.until("fleet")
            except SchedulerUnavailable:
                others[others.index(one)] = Listener(net.address)
                return False
            return True

        await eventually(all_listen, what="the place of a client that left was never free")
        for one in others:
            await one.parts.aclose()
