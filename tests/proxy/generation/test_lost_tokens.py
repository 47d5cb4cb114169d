"""Tokens and prompts that are lost on the way are generated and written again."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest

from millrace.core.backoff import Backoff
from millrace.proxy.fleet import migration
from support.deadlines import HANG_S
from support.gateway import MODEL, Script, gateway, token_event
from support.live_stack import eventually
from support.migrated_answers import (
    BODY,
    COMPLETIONS,
    TEXT,
    ask,
    undisturbed,
)


@pytest.mark.parametrize("lost", [0, 1, 7, 100])
async def test_tokens_that_are_lost_with_a_stream_are_generated_again(stack, lost):
    """A request that is placed while a stream is broken may lose tokens to that stream."""
    expected = await undisturbed(stack, BODY)
    fleet = stack.fleet
    fleet.specs.clear()
    held = fleet.script = Script(reply=TEXT, hold=asyncio.Event(), hold_after=lost)
    await fleet.stop_decode()
    asking = asyncio.create_task(ask(stack, BODY))
    await eventually(lambda: bool(fleet.specs))
    found, many = 0, min(lost, expected.usage["completion_tokens"])

    def are_lost():
        nonlocal found
        found += fleet.lose(fleet.specs[0].proxy.id)
        return found == many

    await eventually(are_lost)
    fleet.script = Script(reply=TEXT)
    await fleet.start_decode()
    await eventually(lambda: len(fleet.specs) == 1 + bool(lost))
    held.hold.set()
    answer = await asyncio.wait_for(asking, HANG_S)
    assert (answer.text, answer.usage) == (expected.text, expected.usage)
    assert [spec.resumed_tokens for spec in fleet.specs] == [0] * (1 + bool(lost))


async def test_a_prompt_that_no_instance_can_read_is_written_again(stack):
    hold = asyncio.Event()

    def lose(spec):
        if len(stack.fleet.specs) > 4:
            stack.fleet.script = Script(reply=TEXT, hold=hold)
        stack.fleet.fail(spec, "no prompt", prompt_unread=True)

    stack.fleet.script = Script(on_submit=lose)
    asking = asyncio.create_task(ask(stack, BODY))
    await eventually(lambda: len(stack.fleet.specs) == 6)
    last = stack.fleet.specs[-1]
    ids = await stack.proxy.store.prompt_ids(last.request_id)
    assert ids.size == last.prompt_tokens == stack.fleet.specs[0].prompt_tokens
    hold.set()
    assert (await asking).text == TEXT
    assert len(stack.fleet.specs) == 6
    assert len({spec.request_id for spec in stack.fleet.specs}) == len(stack.fleet.specs)


async def test_an_attempt_that_begins_again_at_its_instance_gives_no_token_twice(stack):
    """As after a takeover: the placement of the first attempt was never told, and the new leader
    had not heard of the attempt.
    """

    def submitted(spec):
        stack.fleet.script = script = Script(reply=TEXT)
        ids = stack.fleet.tokenizer.encode(TEXT, add_special_tokens=False).ids
        said = partial(token_event, spec, 0, script=script, finish="", stops=False)
        stack.fleet.emit(spec.proxy.id, [said(position, ids[position]) for position in range(3)])
        asyncio.get_running_loop().call_later(0.05, again, spec)

    def again(spec):
        stack.fleet.place(spec)
        stack.fleet.play_later(spec)

    stack.fleet.script = Script(on_submit=submitted)
    answer = await ask(stack, BODY)
    assert answer.text == TEXT and answer.error is None
    assert [spec.resumed_tokens for spec in stack.fleet.specs] == [0, 3]
    await eventually(lambda: stack.fleet.cancels)
    assert stack.fleet.cancels[0].request_id == stack.fleet.specs[0].request_id


def emit(stack, spec, positions):
    script, ids = (
        stack.fleet.script,
        stack.fleet.tokenizer.encode(TEXT, add_special_tokens=False).ids,
    )
    said = partial(token_event, spec, 0, script=script, finish="", stops=False)
    stack.fleet.emit(spec.proxy.id, [said(position, ids[position]) for position in positions])


async def test_tokens_after_first_ones_that_did_not_count_do_not_count(stack):
    """As of an attempt whose first token came while the request was placed elsewhere."""

    def submitted(spec):
        stack.fleet.script = Script(reply=TEXT)
        emit(stack, spec, range(1, 3))
        stack.fleet.place(spec)
        stack.fleet.play_later(spec)

    stack.fleet.script = Script(on_submit=submitted)
    answer = await ask(stack, BODY)
    assert answer.text == TEXT and answer.error is None
    assert len(stack.fleet.specs) == 1


async def test_tokens_that_were_lost_before_their_placement_was_told_are_generated_again(stack):
    fleet = stack.fleet
    fleet.script = Script(on_submit=lambda spec: emit(stack, spec, range(1)))
    await fleet.stop_decode()
    asking = asyncio.create_task(ask(stack, BODY))
    await eventually(lambda: bool(fleet.specs))
    (spec,) = fleet.specs
    assert fleet.lose(spec.proxy.id) == 1
    fleet.script = Script(reply=TEXT)
    await fleet.start_decode()
    assert (await ask(stack, BODY)).text == TEXT  # so the stream is up
    fleet.place(spec)
    answer = await asyncio.wait_for(asking, HANG_S)
    assert answer.text == TEXT and answer.error is None
    assert fleet.specs[-1].request_id.startswith(f"{spec.request_id}.")


@pytest.mark.parametrize("code", ["unavailable", "overloaded", "too_large"])
async def test_a_stream_that_a_new_scheduler_refuses_goes_on_after_its_tokens(stack, code):
    """Its instance has not registered there yet, and still generates."""

    def submitted(spec):
        stack.fleet.script = Script(reply=TEXT)
        emit(stack, spec, range(3))

    stack.fleet.script = Script(on_submit=submitted)
    asking = asyncio.create_task(ask(stack, BODY))
    await stack.begun()
    stack.fleet.refuse(stack.fleet.specs[0], code, "no instance is back")
    answer = await asking
    assert answer.text == TEXT and answer.error is None
    assert [spec.resumed_tokens for spec in stack.fleet.specs] == [0, 3]


async def test_a_stream_whose_next_submission_gets_no_answer_is_submitted_again(tmp_path):
    def silent(spec):
        stack.fleet.script = Script(reply=TEXT)

    def submitted(spec):
        stack.fleet.script = Script(on_submit=silent, reply=TEXT)
        emit(stack, spec, range(3))
        stack.fleet.place(spec)

    async with gateway(tmp_path, "proxy.submit_timeout_s=0.5") as stack:
        stack.fleet.script = Script(on_submit=submitted)
        asking = asyncio.create_task(ask(stack, BODY))
        await stack.begun()
        stack.fleet.fail(stack.fleet.specs[0], "decode d died", resumable=True)
        answer = await asking
    assert answer.text == TEXT and answer.error is None
    assert [spec.resumed_tokens for spec in stack.fleet.specs] == [0, 3, 3]


async def test_a_request_that_a_new_scheduler_refuses_is_another_one_from_then_on(stack):
    """Its instance may still compute it, and what it sends must not meet the next attempt."""

    def refuse(spec):
        stack.fleet.script = Script(reply=TEXT)
        stack.fleet.refuse(spec, "unavailable", "no instance is back")

    stack.fleet.script = Script(on_submit=stack.fleet.place)
    asking = asyncio.create_task(ask(stack, BODY))
    await stack.placed()
    await stack.fleet.stop_scheduler()
    await eventually(lambda: not stack.proxy.gateway.connected)
    stack.fleet.script, stack.fleet.forgets = Script(on_submit=refuse), True
    await stack.fleet.start_scheduler()
    assert (await asking).text == TEXT
    first, last = stack.fleet.specs[0], stack.fleet.specs[-1]
    assert first.request_id != last.request_id


async def test_a_prompt_that_is_lost_again_and_again_has_an_end(tmp_path, monkeypatch):
    at_once = partial(migration.Migration, retry=Backoff(0.0, 0.0))
    monkeypatch.setattr("millrace.proxy.fleet.gateway.Migration", at_once)
    async with gateway(tmp_path) as stack:
        stack.fleet.script = Script(
            on_submit=lambda spec: stack.fleet.fail(spec, "no prompt", prompt_unread=True)
        )
        response = await stack.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "hi"})
        assert (response.status_code, response.json()["error"]["message"]) == (500, "no prompt")
        assert len(stack.fleet.specs) == migration.MOST_MOVES + 1
