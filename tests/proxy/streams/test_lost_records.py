"""Streams go on when the store has lost them."""

from __future__ import annotations

import asyncio

import pytest

from millrace.event_lines import event_lines
from millrace.proxy.streams import lives, owned_stream, reader
from millrace.state.redis.store import RedisStore
from millrace.state.redis.streams import RedisStreams
from millrace.state.store import StoreError
from millrace.state.streams import Hold
from support.gateway import Script
from support.live_stack import eventually
from support.resumable_streams import (
    KINDS,
    REPLY,
    RESUMABLE,
    Decode,
    body_of,
    contents,
    cut,
    events_of,
    finished,
    first_event,
    has_tokens,
    lose,
    metric,
    resumed,
    spied,
    whole,
)


async def is_released(replica, stream_id):
    """Whether the store has no prompt of the stream's request any more."""
    try:
        await replica.proxy.store.prompt_ids(stream_id)
    except StoreError:
        return True
    return False


async def test_a_stream_that_the_store_has_lost_is_recorded_again(replicas, store_url, monkeypatch):
    """As after a restart of Redis without its data: the client has its stream, and no other may."""
    monkeypatch.setattr(lives, "RENEW_S", 0.02)
    renewals = spied(monkeypatch, RedisStreams, "renew")
    one, other = replicas
    hold = asyncio.Event()
    Decode(one, Script(reply=REPLY, hold=hold, hold_after=5))
    path, fields = KINDS[0]
    named = {**RESUMABLE, "x-millrace-request-id": "mine"}
    async with one.http.stream("POST", path, json=body_of(fields), headers=named) as response:
        lines = event_lines(response)
        await first_event(lines)
        await lose(store_url)
        await eventually(lambda: Hold.GONE in renewals and renewals[-1] is Hold.HELD)
        assert metric(one)["restored"] == 1.0
        again = await other.http.post(path, json=body_of(fields), headers=named)
        assert again.status_code == 409
        hold.set()
        assert [line async for line in lines if line][-1] == "data: [DONE]"
    assert renewals.count(Hold.GONE) == 1


@pytest.mark.parametrize("at", [0, 1])
async def test_a_client_that_was_away_has_a_stream_that_the_store_has_lost(
    replicas, store_url, monkeypatch, at
):
    """It comes back before the owner has noticed the loss."""
    monkeypatch.setattr(lives, "RENEW_S", 0.3)
    hold = asyncio.Event()
    decode = Decode(replicas[0], Script(reply=REPLY, hold=hold, hold_after=6))
    path, fields = KINDS[1]
    stream_id, found = await cut(replicas[0], path, fields, 3)
    await decode.at_hold.wait()
    await lose(store_url)
    coming = asyncio.create_task(resumed(replicas[at], stream_id, found[-1][0]))
    await eventually(lambda: metric(replicas[0]).get("restored") == 1.0)
    hold.set()
    rest = events_of(await coming)
    _, undisturbed = await whole(replicas[0], path, fields)
    assert contents(found + rest) == contents(undisturbed)
    assert not replicas[0].fleet.cancels and not replicas[1].fleet.specs


async def test_a_reader_elsewhere_reads_on_when_the_store_has_lost_the_stream(
    replicas, store_url, monkeypatch
):
    monkeypatch.setattr(lives, "RENEW_S", 0.02)
    monkeypatch.setattr(reader, "CHECK_S", 0.02)
    one, other = replicas
    hold = asyncio.Event()
    Decode(one, Script(reply=REPLY, hold=hold, hold_after=6))
    path, fields = KINDS[1]
    stream_id, found = await cut(one, path, fields, 1)
    url = f"/v1/requests/{stream_id}/stream"
    async with other.http.stream("GET", url, headers={"last-event-id": found[0][0]}) as response:
        lines = event_lines(response)
        read = [line async for line in until_event(lines, 4)]
        await lose(store_url)
        await eventually(lambda: metric(one).get("restored") == 1.0)
        hold.set()
        read += [line async for line in lines]
    rest = events_of("\n".join([*read, ""]))
    _, undisturbed = await whole(one, path, fields)
    assert contents(found + rest) == contents(undisturbed)


async def until_event(lines, number):
    """Yields the lines up to the end of the event with this number."""
    seen = False
    async for line in lines:
        yield line
        seen = seen or line.startswith(f"id: {number}-")
        if seen and not line:
            return


async def test_another_replica_adopts_a_stream_that_the_store_had_lost(
    replicas, store_url, monkeypatch
):
    """It finds the prompt and the tokens of before the loss, and generates the rest."""
    monkeypatch.setattr(lives, "RENEW_S", 0.02)
    one, other = replicas
    Decode(one, Script(reply=REPLY, hold=asyncio.Event(), hold_after=6))
    Decode(other, Script(reply=REPLY))
    path, fields = KINDS[1]
    stream_id, found = await cut(one, path, fields, 3)
    await has_tokens(one, 6)
    await lose(store_url)
    await eventually(lambda: metric(one).get("restored") == 1.0)
    await one.proxy.stop()
    rest = events_of(await resumed(other, stream_id, found[-1][0]))
    assert metric(other)["adopted"] == 1.0 and other.fleet.specs[0].resumed_tokens == 6
    _, undisturbed = await whole(other, path, fields)
    assert contents(found + rest) == contents(undisturbed)


async def test_a_stream_whose_end_finds_the_store_without_it_can_be_read(
    replicas, store_url, monkeypatch
):
    """The stream is over before its next renewal."""

    async def keep(stream):
        pass

    monkeypatch.setattr(lives, "RENEW_S", 0.02)
    monkeypatch.setattr(owned_stream.OwnedStream, "keep", keep)
    one, other = replicas
    hold = asyncio.Event()
    decode = Decode(one, Script(reply=REPLY, hold=hold, hold_after=6))
    path, fields = KINDS[1]
    stream_id, found = await cut(one, path, fields, 3)
    await decode.at_hold.wait()
    await lose(store_url)
    hold.set()
    await eventually(lambda: metric(one).get("restored") == 1.0)
    rest = events_of(await resumed(other, stream_id, found[-1][0]))
    await finished(store_url, stream_id)
    assert await other.state_of(stream_id) == "finished"
    _, undisturbed = await whole(one, path, fields)
    assert contents(found + rest) == contents(undisturbed)


@pytest.mark.parametrize("is_lost", [False, True])
async def test_an_end_that_finds_the_store_away_is_written_when_it_is_back(
    replicas, store_url, monkeypatch, is_lost
):
    """Also where the store lost the stream before it went away."""
    monkeypatch.setattr(lives, "RENEW_S", 0.02)
    one, other = replicas
    hold = asyncio.Event()
    decode = Decode(one, Script(reply=REPLY, hold=hold, hold_after=6))
    path, fields = KINDS[1]
    stream_id, found = await cut(one, path, fields, 3)
    await decode.at_hold.wait()
    ends = []

    async def away(*arguments):
        raise StoreError("no server")

    async def away_at_the_end(*arguments):
        ends.append(arguments)
        raise StoreError("no server")

    with monkeypatch.context() as patch:
        patch.setattr(RedisStreams, "renew", away)
        patch.setattr(RedisStreams, "finish", away_at_the_end)
        if is_lost:
            await lose(store_url)
        hold.set()
        await eventually(lambda: len(ends) > 2)
    await eventually(lambda: metric(one).get("restored", 0.0) == float(is_lost))
    await finished(store_url, stream_id)
    rest = events_of(await resumed(other, stream_id, found[-1][0]))
    assert "adopted" not in metric(other)
    _, undisturbed = await whole(one, path, fields)
    assert contents(found + rest) == contents(undisturbed)


async def test_a_request_whose_release_fails_is_released_later(replicas, monkeypatch):
    """The stream's end is written: its request, with the prompt, would stay for hours."""
    monkeypatch.setattr(lives, "RENEW_S", 0.02)
    one, _ = replicas
    Decode(one, Script(reply=REPLY))
    release, refused = RedisStore.release, []

    async def away_twice(store, request_id):
        if len(refused) < 2:
            refused.append(request_id)
            raise StoreError("no server")
        await release(store, request_id)

    monkeypatch.setattr(RedisStore, "release", away_twice)
    stream_id, _ = await whole(one, *KINDS[1])
    await eventually(lambda: is_released(one, stream_id))
    assert refused == [stream_id] * 2


async def test_an_end_whose_answer_was_lost_is_known_as_its_own(replicas, monkeypatch):
    """Redis wrote it: the next try must not take it for another replica's, which would leave the
    request with its prompt in the store.
    """
    monkeypatch.setattr(lives, "RENEW_S", 0.02)
    one, _ = replicas
    Decode(one, Script(reply=REPLY))
    finish, written = RedisStreams.finish, []

    async def answer_lost(store, *arguments):
        written.append(await finish(store, *arguments))
        if len(written) == 1:
            raise StoreError("no answer")
        return written[-1]

    monkeypatch.setattr(RedisStreams, "finish", answer_lost)
    stream_id, _ = await whole(one, *KINDS[1])
    await eventually(lambda: len(written) == 2)
    assert written == [True, True]
    await eventually(lambda: is_released(one, stream_id))


async def test_an_answer_whose_begin_can_not_be_written_goes_on(replicas, store_url, monkeypatch):
    """The store is away when the first token comes: its client gets 200 and all tokens."""
    one, other = replicas
    hold = asyncio.Event()
    decode = Decode(one, Script(reply=REPLY, hold=hold, hold_after=0))
    path, fields = KINDS[1]
    posting = asyncio.create_task(one.http.post(path, json=body_of(fields), headers=RESUMABLE))
    await decode.at_hold.wait()
    renew, refused = RedisStreams.renew, []

    async def away(*arguments):
        refused.append(arguments)
        raise StoreError("no server")

    monkeypatch.setattr(RedisStreams, "renew", away)
    hold.set()
    await eventually(lambda: refused)
    monkeypatch.setattr(RedisStreams, "renew", renew)
    found = await posting
    assert found.status_code == 200 and events_of(found.text)[-1][1] == "data: [DONE]"
    again = await resumed(other, found.headers["x-request-id"])
    assert events_of(again) == events_of(found.text)
