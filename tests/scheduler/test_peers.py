"""Outboxes are bounded, and their end ends the stream."""

from __future__ import annotations

import asyncio

from millrace.scheduler.peers import Outbox


async def test_all_that_waits_is_taken_at_once_in_order():
    outbox = Outbox[int]()
    for number in range(3):
        outbox.put(number)
    assert await outbox.take() == [0, 1, 2]
    waiting = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    assert not waiting.done()
    outbox.put(3)
    assert await waiting == [3]


async def test_a_close_ends_after_what_is_queued():
    outbox = Outbox[int]()
    outbox.put(1)
    outbox.close()
    outbox.put(2)
    assert await outbox.take() == [1]
    assert await outbox.take() == []
    assert outbox.failure == ""


async def test_a_failure_ends_at_once_and_the_first_one_is_told():
    outbox = Outbox[int]()
    outbox.put(1)
    outbox.close("silent for 6.0 s")
    outbox.close("another")
    assert await outbox.take() == []
    assert outbox.failure == "silent for 6.0 s"


async def test_a_peer_that_does_not_read_is_cut_off():
    outbox = Outbox[int](limit=2)
    for number in range(3):
        outbox.put(number)
    assert outbox.closed
    assert outbox.failure == "2 messages wait to be read"
    assert await outbox.take() == []


async def test_a_close_wakes_who_waits():
    outbox = Outbox[int]()
    waiting = asyncio.create_task(outbox.take())
    await asyncio.sleep(0)
    outbox.close()
    assert await waiting == []
