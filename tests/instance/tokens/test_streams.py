"""Outboxes: one message per step, no loss over a reconnect, none kept for a lost proxy."""

import asyncio

import pytest

from millrace.core.incarnation import Incarnation
from millrace.core.token_events import PositionLogprobs, TokenBatch, TokenDetail, TokenEvent
from millrace.instance.tokens import streams as token_streams
from millrace.instance.tokens.streams import TokenStreams
from support.deadlines import eventually

PROXY = Incarnation("proxy-0", 7)


def event(token: int) -> TokenEvent:
    return TokenEvent("r", token_ids=(token,))


def tokens(batch: TokenBatch) -> list[int]:
    return [t for e in batch.events for t in e.token_ids]


async def test_all_that_is_ready_comes_in_one_message() -> None:
    streams = TokenStreams(60, lambda proxy: None)
    for token in range(3):
        streams.publish(PROXY, event(token))

    stream = streams.subscribe(PROXY)

    assert tokens(await anext(stream)) == [0, 1, 2]
    streams.publish(PROXY, event(3))
    assert tokens(await anext(stream)) == [3]
    await stream.aclose()


async def test_a_proxy_that_comes_back_in_time_misses_nothing() -> None:
    gone: list[Incarnation] = []
    streams = TokenStreams(0.2, gone.append)
    stream = streams.subscribe(PROXY)
    streams.publish(PROXY, event(1))
    assert (await anext(stream)).first == 0
    await stream.aclose()
    streams.publish(PROXY, event(2))

    again = streams.subscribe(PROXY)

    batch = await anext(again)
    assert (batch.first, tokens(batch)) == (1, [2])
    await asyncio.sleep(0.3)
    assert gone == []
    await again.aclose()


@pytest.mark.parametrize("received", range(6))
async def test_what_a_broken_stream_was_sent_comes_again(received: int) -> None:
    streams = TokenStreams(60, lambda proxy: None)
    broken = streams.subscribe(PROXY)
    for token in range(4):  # in batches of one, one and two events
        streams.publish(PROXY, event(token))
        if token != 2:
            await anext(broken)
    streams.publish(PROXY, event(4))

    resumed = streams.subscribe(PROXY, received)

    batch = await anext(resumed)
    if received == 5:  # more than it was sent
        received = 4
    assert (batch.first, tokens(batch)) == (received, list(range(received, 5)))
    await resumed.aclose()
    again = streams.subscribe(PROXY, received)
    assert await anext(again) == batch
    streams.publish(PROXY, event(5))
    assert await anext(again) == TokenBatch(5, [event(5)])
    await again.aclose()
    await broken.aclose()


async def test_a_proxy_that_has_not_counted_gets_nothing_again() -> None:
    streams = TokenStreams(60, lambda proxy: None)
    broken = streams.subscribe(PROXY)
    streams.publish(PROXY, event(0))
    await anext(broken)

    new = streams.subscribe(PROXY)

    assert await anext(new) == TokenBatch(1, [])
    await new.aclose()
    await broken.aclose()


LARGE = [
    TokenDetail(prompt_logprobs=(PositionLogprobs((1, 0.0)),) * 40),
    TokenDetail(pooled=bytes(40 * 256)),
]


@pytest.mark.parametrize("detail", LARGE)
async def test_what_is_kept_for_a_proxy_is_bounded(
    detail: TokenDetail, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_streams, "MOST_KEPT_EVENTS", 40)
    streams = TokenStreams(60, lambda proxy: None)

    async def resumed(received: int) -> TokenBatch:
        stream = streams.subscribe(PROXY, received)
        batch = await anext(stream)
        await stream.aclose()
        return batch

    for token in range(60):
        streams.publish(PROXY, event(token))
        assert (await resumed(token)).first == token
    assert await resumed(19) == TokenBatch(60, [])  # the oldest of the 41 is gone
    assert tokens(await resumed(20)) == list(range(20, 60))
    streams.publish(PROXY, event(60)._replace(detail=detail))
    assert tokens(await resumed(60)) == [60]
    assert await resumed(60) == TokenBatch(61, [])


async def test_a_proxy_that_stays_away_is_given_up() -> None:
    gone: list[Incarnation] = []
    streams = TokenStreams(0.02, gone.append)
    streams.publish(PROXY, event(1))

    await asyncio.sleep(0.1)

    assert gone == [PROXY]
    assert streams.check_integrity() == []


@pytest.mark.parametrize("taken", [0, 1])
async def test_a_lost_proxy_that_comes_back_hears_how_many_events_it_should_have(
    taken: int,
) -> None:
    gone: list[Incarnation] = []
    streams = TokenStreams(0.02, gone.append)
    streams.publish(PROXY, event(1))
    if taken:
        stream = streams.subscribe(PROXY)
        await anext(stream)
        await stream.aclose()
    await eventually(lambda: gone == [PROXY])

    again = streams.subscribe(PROXY)

    assert await anext(again) == TokenBatch(1, [])
    await again.aclose()


async def test_a_proxy_that_reads_too_slowly_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_streams, "MOST_WAITING_EVENTS", 10)
    gone: list[Incarnation] = []
    streams = TokenStreams(60, gone.append)
    stream = streams.subscribe(PROXY)
    streams.publish(PROXY, event(0))
    await anext(stream)
    for token in range(11):
        streams.publish(PROXY, event(token))

    assert gone == [PROXY]
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_lives_of_one_proxy_are_apart() -> None:
    streams = TokenStreams(60, lambda proxy: None)
    streams.publish(Incarnation("proxy-0", 8), event(8))
    streams.publish(PROXY, event(7))

    stream = streams.subscribe(Incarnation("proxy-0", 8))

    assert tokens(await anext(stream)) == [8]
    await stream.aclose()


async def test_a_newer_reader_ends_an_older_one() -> None:
    gone: list[Incarnation] = []
    streams = TokenStreams(0.05, gone.append)
    old = streams.subscribe(PROXY)
    assert await anext(old) == TokenBatch(0, [])
    waiting = asyncio.create_task(anext(old))
    await asyncio.sleep(0)
    new = streams.subscribe(PROXY)
    assert await anext(new) == TokenBatch(0, [])
    reading = asyncio.create_task(anext(new))
    with pytest.raises(StopAsyncIteration):
        await waiting

    streams.publish(PROXY, event(4))

    assert tokens(await reading) == [4]
    await asyncio.sleep(0.1)
    assert gone == []
    await new.aclose()
