"""A replica adopts the stream of another one that was lost, and finishes its answer."""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack

import pytest

from millrace.concurrency import cancel
from millrace.event_lines import event_lines
from millrace.proxy.streams import lives
from millrace.state.redis.streams import RedisStreams
from millrace.state.store import JournalEntry
from support.deadlines import HANG_S
from support.gateway import Script, gateway
from support.limits import KEY, two_limited, until_left
from support.live_stack import eventually
from support.resumable_streams import (
    COMPLETIONS,
    KINDS,
    MESSAGE,
    REPLY,
    RESUMABLE,
    Decode,
    bars_of,
    body_of,
    contents,
    cut,
    events_of,
    finished,
    has_tokens,
    metric,
    resumed,
    spied,
    trace_at,
    whole,
)
from support.stores import private_redis


@pytest.mark.parametrize(("path", "fields"), [*KINDS[:4], MESSAGE])
@pytest.mark.parametrize(("sent", "journalled"), [(1, 0), (3, 8), (8, 3)])
async def test_another_replica_adopts_a_lost_stream(
    replicas, store_url, short_leases, monkeypatch, path, fields, sent, journalled
):
    """`sent` events had come; the journal has more tokens, or fewer, or none."""
    one, other = replicas
    Decode(other, Script(reply=REPLY))
    _, undisturbed = await whole(other, path, fields)
    lost = Decode(one, Script(reply=REPLY, hold=asyncio.Event(), hold_after=12))
    lost.journalled = journalled
    stream_id, found = await cut(one, path, fields, sent)
    await lost.at_hold.wait()
    await one.proxy.store.finish({stream_id: "cancelled"})  # by the scheduler: the replica is dead
    monkeypatch.setattr(lives, "RENEW_S", 0.02)  # for the other one
    rest = events_of(await resumed(other, stream_id, found[-1][0]))
    assert contents(found + rest) == contents(undisturbed)
    spec = other.fleet.specs[-1]
    assert (spec.request_id, spec.resumed_tokens) == (f"{stream_id}.2.1", journalled)
    assert spec.sampling.seed == one.fleet.specs[-1].sampling.seed
    assert metric(other)["adopted"] == 1.0
    # The whole stream can be read again at both, from the journal of its last incarnation: the one
    # that has lost it does not know that yet, and holds its own tokens.
    await finished(store_url, stream_id)
    for stack in replicas:
        again = await resumed(stack, stream_id)
        assert events_of(again) == found + rest, again
    lost.script.hold.set()


@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
async def test_an_adopted_request_has_the_age_that_the_stores_clock_says(
    replicas, short_leases, monkeypatch, step_s
):
    """The wall clock of the replica that adopts it is an hour off."""
    one, other = replicas
    path, fields = KINDS[0]
    lost = Decode(one, Script(reply=REPLY, hold=asyncio.Event(), hold_after=12))
    stream_id, found = await cut(one, path, {**fields, "millrace": {"e2e_slo_ms": 2_000_000}}, 3)
    await lost.at_hold.wait()
    await one.proxy.store.finish({stream_id: "cancelled"})
    Decode(other, Script(reply=REPLY))
    unix_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: unix_ns() + round(step_s * 1e9))
    monkeypatch.setattr(lives, "RENEW_S", 0.02)
    await resumed(other, stream_id, found[-1][0])
    assert 2000.0 - 10 * HANG_S < other.fleet.specs[-1].slo.e2e_s < 2000.0
    lost.script.hold.set()


@pytest.mark.parametrize("ended", ["cancelled", "finished"])
async def test_a_replica_whose_request_has_ended_has_died_before_its_lease_lapses(
    replicas, monkeypatch, ended
):
    """The scheduler cancels the requests of a proxy whose connection ends. Decode may have finished
    one before. No event of the stream has reached its client.
    """
    monkeypatch.setattr(lives, "RENEW_S", HANG_S)
    monkeypatch.setattr(lives, "LEASE_S", 10 * HANG_S)
    monkeypatch.setattr(lives, "QUIET_S", 0.0)
    one, other = replicas
    path, fields = KINDS[0]
    hold = asyncio.Event()
    Decode(one, Script(reply=REPLY, hold=hold, hold_after=0))
    leaving = asyncio.create_task(one.http.post(path, json=body_of(fields), headers=RESUMABLE))
    await one.fleet.submitted.wait()
    stream_id = one.fleet.specs[0].request_id
    await cancel(leaving)
    Decode(other, Script(reply=REPLY))
    looks = spied(monkeypatch, RedisStreams, "get")
    coming = asyncio.create_task(resumed(other, stream_id))
    await eventually(lambda: len(looks) > 4)
    assert not metric(other).get("adopted")  # its request is alive
    await one.proxy.store.finish({stream_id: ended})
    if ended == "finished":
        seen = len(looks)
        await eventually(lambda: len(looks) > seen + 2)
        assert not metric(other).get("adopted")  # the journal lacks the tokens
        ids = [*one.fleet.tokenizer.encode(REPLY, add_special_tokens=False).ids, 1]
        entry = JournalEntry(request_id=stream_id, choice=0, start=0, token_ids=ids)
        await one.proxy.store.append_tokens([entry])
    found = events_of(await coming)
    assert metric(other)["adopted"] == 1.0
    assert len(other.fleet.specs) == (ended == "cancelled")  # computed again, or not
    assert contents(found) == contents((await whole(other, path, fields))[1])
    hold.set()


@pytest.mark.parametrize("ended", ["finished", "failed"])
async def test_the_tokens_that_a_finished_request_has_not_journalled_come_again(
    replicas, short_leases, monkeypatch, ended
):
    """Its replica and its decode instance have died. A request that has failed does not go on."""
    one, other = replicas
    lost = Decode(one, Script(reply=REPLY, hold=asyncio.Event(), hold_after=12))
    lost.journalled = 4
    stream_id, found = await cut(one, *KINDS[0], 3)
    await lost.at_hold.wait()
    await one.proxy.store.finish({stream_id: ended})
    monkeypatch.setattr(lives, "RENEW_S", 0.02)  # for the other one
    Decode(other, Script(reply=REPLY))
    text = await resumed(other, stream_id, found[-1][0])
    if ended == "failed":
        assert "The stream's request is lost." in text and not other.fleet.specs
    else:
        assert other.fleet.specs[-1].resumed_tokens == 4
        assert contents(found + events_of(text)) == contents((await whole(other, *KINDS[0]))[1])
    lost.script.hold.set()


async def test_the_replica_that_adopts_a_stream_settles_its_limits(
    tmp_path, store_url, monkeypatch
):
    monkeypatch.setattr(lives, "LEASE_S", 0.0)
    monkeypatch.setattr(lives, "RENEW_S", 0.02)
    async with two_limited(tmp_path, store_url, tokens_per_day=1000, concurrency=1) as replicas:
        one, other = replicas
        for stack in replicas:
            stack.http.headers.update(KEY)
        path, fields = COMPLETIONS, {"prompt": [5, 6, 7], "max_tokens": 64}
        lost = Decode(one, Script(reply=REPLY, hold=asyncio.Event(), hold_after=12))
        stream_id, found = await cut(one, path, fields, 3)
        await until_left(other, "tokens", 1000 - 3 - 64)
        await one.proxy.store.finish({stream_id: "cancelled"})  # by the scheduler
        hold = asyncio.Event()
        decode = Decode(other, Script(reply=REPLY, hold=hold, hold_after=14))
        coming = asyncio.create_task(resumed(other, stream_id, found[-1][0]))
        await eventually(lambda: metric(other).get("adopted") == 1.0)
        refused = await other.http.post(path, json=body_of(fields))
        assert "concurrency: limit 1" in refused.json()["error"]["message"]
        lost.script.hold.set()
        await one.idle()  # it has learned that the stream is another's
        await until_left(other, "tokens", 1000 - 3 - 64)
        hold.set()
        assert events_of(await coming)[-1][1] == "data: [DONE]"
        tokens = len(decode.fleet.tokenizer.encode(REPLY, add_special_tokens=False).ids) + 1
        await until_left(one, "tokens", 1000 - 3 - tokens)
        assert (await other.http.post(path, json=body_of(fields))).status_code == 200


async def test_an_answer_that_ends_with_its_adoption_is_read_whole(
    replicas, short_leases, monkeypatch
):
    """The journal has all of it: its end is written while the reader notes the first token."""
    one, other = replicas
    path, fields = KINDS[0]
    Decode(other, Script(reply=REPLY))
    known_id, undisturbed = await whole(other, path, fields)
    lost = Decode(one, Script(reply=REPLY, hold=asyncio.Event(), hold_after=0))
    posting = asyncio.create_task(one.http.post(path, json=body_of(fields), headers=RESUMABLE))
    await one.placed()
    stream_id, ids = one.fleet.specs[-1].request_id, await other.proxy.store.journal(known_id, 0)
    entry = JournalEntry(request_id=stream_id, choice=0, start=0, token_ids=ids.tolist())
    await one.proxy.store.append_tokens([entry])
    finish, get = RedisStreams.finish, RedisStreams.get
    finishing, read = asyncio.Event(), asyncio.Event()

    async def finish_slowly(*arguments):
        finishing.set()
        found = await finish(*arguments)
        await read.wait()
        return found

    async def get_noted(*arguments):
        found = await get(*arguments)
        if finishing.is_set():
            read.set()
        return found

    monkeypatch.setattr(RedisStreams, "finish", finish_slowly)
    monkeypatch.setattr(RedisStreams, "get", get_noted)
    text = await resumed(other, stream_id)
    lost.script.hold.set()
    assert contents(events_of(text)) == contents(undisturbed), text
    assert not other.fleet.specs[1:]
    assert (await posting).status_code == 409  # another replica continues it


async def test_an_adopted_stream_can_be_adopted_again(replicas, short_leases):
    one, other = replicas
    path, fields = KINDS[1]
    holds = [asyncio.Event(), asyncio.Event()]
    Decode(one, Script(reply=REPLY, hold=holds[0], hold_after=5)).journalled = 4
    stream_id, found = await cut(one, path, fields, 3)
    Decode(other, Script(reply=REPLY, hold=holds[1], hold_after=9))
    async with other.http.stream(
        "GET", f"/v1/requests/{stream_id}/stream", headers={"last-event-id": found[-1][0]}
    ) as response:
        lines = event_lines(response)
        while len(found) < 7:
            if (line := await anext(lines)).startswith("id: "):
                found.append((line[4:], await anext(lines)))
    holds[0].set()
    await one.idle()  # it has abandoned the stream
    Decode(one, Script(reply=REPLY))
    rest = events_of(await resumed(one, stream_id, found[-1][0]))
    assert one.fleet.specs[-1].request_id == f"{stream_id}.3.1"
    holds[1].set()
    _, undisturbed = await whole(one, path, fields)
    assert contents(found + rest) == contents(undisturbed)


async def test_a_proxy_that_stops_hands_its_streams_over(tmp_path):
    async with AsyncExitStack() as exits:
        url = await exits.enter_async_context(private_redis())
        settings = (f"store.url={url}", "proxy.drain_timeout_s=0")
        other = await exits.enter_async_context(gateway(tmp_path / "b", *settings))
        Decode(other, Script(reply=REPLY))
        path, fields = KINDS[0]
        async with gateway(tmp_path / "a", *settings) as one:
            Decode(one, Script(reply=REPLY, hold=asyncio.Event(), hold_after=6))
            stream_id, found = await cut(one, path, fields, 3)
            await has_tokens(one, 6)
            await one.proxy.stop()
            rest = events_of(await resumed(other, stream_id, found[-1][0]))
            _, undisturbed = await whole(other, path, fields)
            assert contents(found + rest) == contents(undisturbed)
            await one.idle()
            whole_trace = await trace_at(other, stream_id)
            told = bars_of(whole_trace)["adopted"]["attributes"]
            [former, _] = [bar for bar in whole_trace["spans"] if bar["name"] == "answer"]
            assert told == {"tokens": "6", "former": former["instance_id"]}
            assert former["attributes"]["completion_tokens"] == "6"  # as of its last moment
            assert "error" not in whole_trace
