"""Who may take the id of a stream, and when it is free again."""

from __future__ import annotations

import asyncio

from millrace.core.incarnation import Incarnation
from millrace.event_lines import event_lines
from millrace.proxy.streams import lives
from millrace.state.streams import MemoryStreams
from support.gateway import Script, gateway
from support.live_stack import eventually
from support.resumable_streams import (
    CHAT,
    KINDS,
    MESSAGES,
    REPLY,
    RESUMABLE,
    Decode,
    body_of,
    events_of,
    first_event,
    lose,
    metric,
    resumed,
)


async def test_who_waits_for_a_stream_that_is_refused_may_send_the_request_again(stack):
    stack.fleet.script = Script(on_submit=lambda spec: None)
    named, body = {**RESUMABLE, "x-millrace-request-id": "mine"}, body_of(KINDS[0][1])
    posting = asyncio.create_task(stack.http.post(CHAT, json=body, headers=named))
    await stack.fleet.submitted.wait()
    waiting = asyncio.create_task(resumed(stack, "mine"))
    await eventually(lambda: "resumed" in metric(stack))
    stack.fleet.refuse(stack.fleet.specs[0], "overloaded", "no room", retry_after_s=7)
    assert (await posting).status_code == 429
    assert '"code":"unavailable"' in await waiting
    Decode(stack, Script(reply=REPLY))
    assert (await stack.http.post(CHAT, json=body, headers=named)).status_code == 200


async def test_of_two_streams_of_one_id_the_recorded_one_goes_on(replicas, store_url, monkeypatch):
    """The store lost the first one, and another replica took the id before the first renewed."""
    one, other = replicas
    hold = asyncio.Event()
    Decode(one, Script(reply=REPLY, hold=hold, hold_after=5))
    Decode(other, Script(reply=REPLY, hold=hold, hold_after=5))
    path, fields = KINDS[0]
    named = {**RESUMABLE, "x-millrace-request-id": "mine"}
    async with one.http.stream("POST", path, json=body_of(fields), headers=named) as first:
        lines = event_lines(first)
        await first_event(lines)
        await lose(store_url)
        posting = asyncio.create_task(other.http.post(path, json=body_of(fields), headers=named))
        await eventually(lambda: metric(other).get("started") == 1.0)
        rest = [line async for line in lines if line]
        assert "continued_elsewhere" in rest[-1] and metric(one)["fenced"] == 1.0
        hold.set()
    found = await posting
    assert found.status_code == 200 and events_of(found.text)[-1][1] == "data: [DONE]"


async def test_an_id_is_not_taken_before_its_request_is_accepted(stack, monkeypatch):
    """It may still be refused: 409 would tell the client that its stream is there."""
    Decode(stack, Script(reply=REPLY))
    create, begun, go_on = MemoryStreams.create, asyncio.Event(), asyncio.Event()

    async def slow(*arguments, **fields):
        begun.set()
        await go_on.wait()
        return await create(*arguments, **fields)

    monkeypatch.setattr(MemoryStreams, "create", slow)
    named, body = {**RESUMABLE, "x-millrace-request-id": "mine"}, body_of(KINDS[0][1])
    posting = asyncio.create_task(stack.http.post(KINDS[0][0], json=body, headers=named))
    await begun.wait()
    assert (await stack.http.post(KINDS[0][0], json=body, headers=named)).status_code == 503
    go_on.set()
    assert (await posting).status_code == 200
    assert (await stack.http.post(KINDS[0][0], json=body, headers=named)).status_code == 409


async def test_a_stream_whose_id_is_asked_for_again_goes_on(stack):
    """Its client has lost the connection before the 200, and posts again at the same replica."""
    hold = asyncio.Event()
    decode = Decode(stack, Script(reply=REPLY, hold=hold, hold_after=0))
    named, body = {**RESUMABLE, "x-millrace-request-id": "mine"}, body_of(KINDS[0][1])
    posting = asyncio.create_task(stack.http.post(CHAT, json=body, headers=named))
    await decode.at_hold.wait()
    assert (await stack.http.post(CHAT, json=body, headers=named)).status_code == 409
    assert stack.proxy.models.inflight == 1
    hold.set()
    found = await posting
    assert found.status_code == 200 and events_of(found.text)[-1][1] == "data: [DONE]"


async def test_the_id_of_a_migrated_request_that_is_refused_is_free_again(tmp_path):
    """The store has two records of it: 409 for the first would name a stream that is not there."""

    def move(spec):
        stack.fleet.script = Script(on_submit=lambda moved: None)  # the scheduler is silent
        stack.fleet.fail(spec, "the store is away", prompt_unread=True)

    async with gateway(tmp_path, "proxy.submit_timeout_s=1") as stack:
        stack.fleet.script = Script(on_submit=move)
        named, body = {**RESUMABLE, "x-millrace-request-id": "mine"}, body_of(KINDS[0][1])
        refused = await stack.http.post(KINDS[0][0], json=body, headers=named)
        assert refused.status_code == 503 and len(stack.fleet.specs) == 2
        Decode(stack, Script(reply=REPLY))
        assert (await stack.http.post(KINDS[0][0], json=body, headers=named)).status_code == 200


async def test_the_id_of_a_start_that_broke_is_free_again(stack, monkeypatch):
    Decode(stack, Script(reply=REPLY))
    create = MemoryStreams.create

    async def broken(*arguments, **fields):
        await create(*arguments, **fields)
        raise RuntimeError("a defect")

    named, body = {**RESUMABLE, "x-millrace-request-id": "mine"}, body_of(KINDS[0][1])
    monkeypatch.setattr(MemoryStreams, "create", broken)
    assert (await stack.http.post(KINDS[0][0], json=body, headers=named)).status_code == 500
    monkeypatch.setattr(MemoryStreams, "create", create)
    assert (await stack.http.post(KINDS[0][0], json=body, headers=named)).status_code == 200


async def test_the_id_of_a_refused_stream_that_the_store_had_lost_is_free_again(
    replicas, store_url, monkeypatch
):
    """What is written again has to be found again, also when more is known of the request since."""

    def submitted(spec):
        one.fleet.suspect(spec, Incarnation("prefill-7", 3))
        one.fleet.place(spec)

    monkeypatch.setattr(lives, "RENEW_S", 0.02)
    one, _ = replicas
    one.fleet.script = Script(on_submit=submitted)
    named, body = {**RESUMABLE, "x-millrace-request-id": "mine"}, body_of(KINDS[0][1])
    posting = asyncio.create_task(one.http.post(CHAT, json=body, headers=named))
    await one.placed()
    await lose(store_url)
    await eventually(lambda: metric(one).get("restored") == 1.0)
    one.fleet.refuse(one.fleet.specs[0], "overloaded", "no room", retry_after_s=7)
    assert (await posting).status_code == 429
    Decode(one, Script(reply=REPLY))
    assert (await one.http.post(CHAT, json=body, headers=named)).status_code == 200


async def test_an_id_is_taken_while_its_stream_is_generated_though_the_store_has_lost_it(
    replicas, store_url
):
    """The request was migrated since, so that the gateway does not know the first id either."""
    one, _ = replicas
    hold = asyncio.Event()
    decode = Decode(one, Script(reply=REPLY, hold=hold, hold_after=0))
    named, body = {**RESUMABLE, "x-millrace-request-id": "mine"}, body_of(KINDS[0][1])
    posting = asyncio.create_task(one.http.post(CHAT, json=body, headers=named))
    await decode.at_hold.wait()
    await lose(store_url)
    one.fleet.move(one.fleet.specs[0])
    await eventually(lambda: len(one.fleet.specs) == 2)
    again = await one.http.post(CHAT, json=body, headers=named)
    assert again.status_code == 409 and len(one.fleet.specs) == 2
    hold.set()
    found = await posting
    assert found.status_code == 200 and events_of(found.text)[-1][1] == "data: [DONE]"
    assert (await one.http.post(CHAT, json=body, headers=named)).status_code == 409  # restored


async def test_the_id_of_a_refused_request_is_free_again(stack):
    stack.fleet.script = Script(
        on_submit=lambda spec: stack.fleet.refuse(spec, "overloaded", "no room", retry_after_s=7)
    )
    named = {"x-millrace-request-id": "mine"}
    body = body_of({"messages": MESSAGES})
    for headers in (named, {**named, **RESUMABLE}, named):
        response = await stack.http.post(CHAT, json=body, headers=headers)
        assert response.status_code == 429

        async def gone():
            found = [await stack.http.get(f"/v1/requests/mine{end}") for end in ("", "/stream")]
            return [one.status_code for one in found] == [404, 404]

        await eventually(gone)
