"""A resumed stream is read on from every event, at its replica or at another one."""

from __future__ import annotations

import asyncio

import orjson
import pytest

from millrace.event_lines import event_lines
from millrace.proxy.streams import lives, reader
from millrace.state.streams import MemoryStreams
from support.deadlines import HANG_S
from support.gateway import Script, gateway
from support.live_stack import eventually
from support.resumable_streams import (
    ANTHROPIC,
    CHAT,
    KINDS,
    MESSAGE,
    MESSAGES,
    REPLY,
    RESUMABLE,
    Decode,
    body_of,
    contents,
    cut,
    events_of,
    first_event,
    metric,
    resumed,
    spied,
    whole,
)
from support.stores import private_redis
from support.tool_model import THOUGHT, TWO, WEATHER, serving


@pytest.mark.parametrize(("path", "fields"), [*KINDS, MESSAGE])
async def test_an_ended_stream_continues_from_every_event(replicas, path, fields):
    Decode(replicas[0], Script(reply=REPLY))
    stream_id, events = await whole(replicas[0], path, fields)
    last = 'event: message_stop\ndata: {"type":"message_stop"}'
    assert len(events) > 4 and events[-1][1] == (last if path == ANTHROPIC else "data: [DONE]")
    assert [number.partition("-")[0] for number, _ in events] == [
        str(i + 1) for i in range(len(events))
    ]
    for stack in replicas:
        assert events_of(await resumed(stack, stream_id)) == events
        for i, (number, _) in enumerate(events):
            assert events_of(await resumed(stack, stream_id, number)) == events[i + 1 :]


@pytest.mark.parametrize("reply", [TWO, THOUGHT])
async def test_parsed_answers_continue_with_the_same_calls(tmp_path, reply):
    async with private_redis() as url, serving(tmp_path, f"store.url={url}") as stack:
        Decode(stack, Script(reply=reply))
        tool = {"name": "weather", "input_schema": WEATHER["parameters"]}
        for path, tools in (
            (CHAT, [{"type": "function", "function": WEATHER}]),
            (ANTHROPIC, [tool]),
        ):
            stream_id, events = await whole(stack, path, {"messages": MESSAGES, "tools": tools})
            for i, (number, _) in enumerate(events):
                assert events_of(await resumed(stack, stream_id, number)) == events[i + 1 :]


@pytest.mark.parametrize("at", [0, 1])
async def test_a_client_that_left_comes_back_while_the_stream_goes_on(replicas, at):
    """At its owner and at another replica, which reads the journal."""
    hold = asyncio.Event()
    Decode(replicas[0], Script(reply=REPLY, hold=hold, hold_after=6))
    path, fields = KINDS[1]
    stream_id, found = await cut(replicas[0], path, fields, 3)
    coming = asyncio.create_task(resumed(replicas[at], stream_id, found[-1][0]))
    await eventually(lambda: "resumed" in metric(replicas[at]))
    assert not replicas[0].fleet.cancels
    hold.set()
    rest = events_of(await coming)
    assert not replicas[0].fleet.cancels and not replicas[1].fleet.specs
    hold.set()
    _, undisturbed = await whole(replicas[0], path, fields)
    assert contents(found + rest) == contents(undisturbed)
    assert [int(n.partition("-")[0]) for n, _ in found + rest] == [
        i + 1 for i in range(len(undisturbed))
    ]


async def test_an_ended_stream_has_the_tokens_that_its_instance_died_with(replicas):
    one, other = replicas
    Decode(one, Script(reply=REPLY)).journalled = 3
    stream_id, events = await whole(one, *KINDS[0])
    assert events_of(await resumed(other, stream_id)) == events


async def test_a_replica_that_is_cut_off_ends_its_work(replicas, monkeypatch):
    """It learns of the adoption when it renews its lease: it sends no end and changes nothing."""
    one, other = replicas
    monkeypatch.setattr(lives, "RENEW_S", HANG_S)
    monkeypatch.setattr(lives, "LEASE_S", 0.0)
    hold = asyncio.Event()
    Decode(one, Script(reply=REPLY, hold=hold, hold_after=5))
    Decode(other, Script(reply=REPLY))
    path, fields = KINDS[0]
    async with one.http.stream("POST", path, json=body_of(fields), headers=RESUMABLE) as response:
        lines = event_lines(response)
        await first_event(lines)
        stream_id = response.headers["x-request-id"]
        events = events_of(await resumed(other, stream_id))
        assert events[-1][1] == "data: [DONE]"
        one.fleet.move(one.fleet.specs[0])  # it tells the store where it goes on
        rest = [line async for line in lines if line]
    assert orjson.loads(rest[-1].removeprefix("data: "))["error"]["code"] == "continued_elsewhere"
    hold.set()
    assert events_of(await resumed(other, stream_id)) == events


async def test_a_migrated_stream_is_read_at_another_replica(replicas):
    one, other = replicas
    hold = asyncio.Event()
    decode = Decode(one, Script(reply=REPLY, hold=hold, hold_after=6))
    decode.journalled = 4  # its decode instance dies before it has journalled all
    path, fields = KINDS[1]
    stream_id, found = await cut(one, path, fields, 3)
    coming = asyncio.create_task(resumed(other, stream_id, found[-1][0]))
    await eventually(lambda: "resumed" in metric(other))
    await decode.at_hold.wait()
    decode.journalled, decode.script = None, Script(reply=REPLY)
    one.fleet.move(one.fleet.specs[0])
    rest = events_of(await coming)
    hold.set()
    _, undisturbed = await whole(one, path, fields)
    assert contents(found + rest) == contents(undisturbed)
    assert other.fleet.specs == []


async def test_another_answer_is_an_error_and_no_text(replicas, short_leases):
    """If the regenerated tokens differ from those that were sent, an error ends the stream."""
    one, other = replicas
    lost = Decode(one, Script(reply=REPLY, hold=asyncio.Event(), hold_after=8))
    lost.journalled = 2
    stream_id, found = await cut(one, *KINDS[0], 7)
    Decode(other, Script(reply="Rivers run to the mill, and the mill grinds wheat, rye, barley."))
    text = await resumed(other, stream_id, found[-1][0])
    assert events_of(text) == []
    assert orjson.loads(text.strip().removeprefix("data: "))["error"]["code"] == "diverged"
    lost.script.hold.set()


async def test_without_a_client_a_stream_is_cancelled_after_the_grace_time(tmp_path, monkeypatch):
    monkeypatch.setattr(lives, "RENEW_S", 0.02)
    monkeypatch.setattr(reader, "LAST_TOKENS_S", 0.0)
    async with gateway(tmp_path, "proxy.resume_grace_s=0.1") as stack:
        Decode(stack, Script(reply=REPLY, hold=asyncio.Event(), hold_after=4))
        stream_id, found = await cut(stack, *KINDS[0], 2)
        await asyncio.wait_for(stack.fleet.cancelled.wait(), HANG_S)
        assert stack.fleet.cancels[0].reason == "expired"

        async def ended():
            return '"expired"' in await resumed(stack, stream_id, found[-1][0])

        await eventually(ended)
        assert metric(stack)["expired"] == 1.0


async def test_a_reader_keeps_a_stream_wanted(stack, monkeypatch):
    monkeypatch.setattr(reader, "CHECK_S", 0.02)
    wanted = spied(monkeypatch, MemoryStreams, "want")
    hold = asyncio.Event()
    Decode(stack, Script(reply=REPLY, hold=hold, hold_after=4))
    stream_id, found = await cut(stack, *KINDS[0], 2)
    assert not wanted
    coming = asyncio.create_task(resumed(stack, stream_id, found[-1][0]))
    await eventually(lambda: len(wanted) > 2)
    hold.set()
    assert events_of(await coming)[-1][1] == "data: [DONE]"
