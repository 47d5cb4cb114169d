"""A request loses instances again and again: when it goes on, and when it ends."""

from __future__ import annotations

import asyncio

import numpy as np

from millrace.core.incarnation import Incarnation
from millrace.core.request import MIN_KEPT_TOKENS
from millrace.proxy.fleet import migration
from millrace.wire.moves import PREEMPTED
from support.gateway import MODEL, Script
from support.live_stack import eventually
from support.migrated_answers import (
    BODY,
    COMPLETIONS,
    TEXT,
    ask,
    disturbed,
)


async def test_several_choices_without_a_token_are_submitted_anew(stack):
    def fail_once(spec):
        stack.fleet.script = Script(reply=TEXT)
        stack.fleet.fail(spec, "decode died", resumable=True)

    stack.fleet.script = Script(on_submit=fail_once)
    answer = await ask(stack, {**BODY, "n": 2})
    assert len(answer.text) == 2 * len(TEXT)
    assert stack.fleet.specs[1].resumed_tokens == 0


async def test_a_request_that_loses_every_instance_ends(stack):
    stack.fleet.script = Script(
        on_submit=lambda spec: stack.fleet.fail(spec, "decode died", resumable=True)
    )
    response = await stack.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "hi"})
    assert response.status_code == 500
    assert len(stack.fleet.specs) == migration.MOST_MOVES + 1


async def test_a_quarantined_request_ends_and_its_client_is_not_to_try_again(stack):
    stack.fleet.script = Script(
        on_submit=lambda spec: stack.fleet.fail(spec, "instances die", quarantined=True)
    )
    response = await stack.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "hi"})
    error = response.json()["error"]
    assert (response.status_code, error["code"], error["message"]) == (
        *(500, "quarantined"),
        "instances die",
    )
    assert response.headers["x-should-retry"] == "false"
    assert len(stack.fleet.specs) == 1


async def test_a_continuation_names_the_lost_instances(stack):
    """Those that the scheduler has told of, and the instance of the tokens."""
    told = Incarnation("prefill-7", 3)

    def lose(spec):
        stack.fleet.suspect(spec, told)
        stack.fleet.fail(spec, "decode died", resumable=True)

    await disturbed(stack, BODY, lose)
    first, second = stack.fleet.specs
    assert (first.deaths, second.deaths) == ((), (told, stack.fleet.decode))


async def test_a_name_that_another_request_has_is_passed_over(stack):
    """As of a request of the same id, which another replica took after a loss of the store."""
    prompt = np.array([5], dtype=np.int32)

    async def lose(spec):
        await stack.proxy.store.create(f"{spec.request_id}.1", spec=b"other", prompt_ids=prompt)
        stack.fleet.fail(spec, "decode died", resumable=True)

    answer = await disturbed(stack, BODY, lose)
    assert answer.text == TEXT and answer.error is None
    first, second = stack.fleet.specs
    assert second.request_id == f"{first.request_id}.2"
    record = await stack.proxy.store.get(f"{first.request_id}.1")
    assert (record.spec, record.state) == (b"other", "queued")


async def test_two_requests_of_one_id_do_not_share_a_name(stack):
    """Both are at one proxy: the store had lost the first one when the second one came."""
    fleet, named = stack.fleet, {"x-millrace-request-id": "mine"}
    held = fleet.script = Script(reply=TEXT, hold=asyncio.Event(), hold_after=0)

    async def asked_and_moved(specs):
        asking = asyncio.create_task(ask(stack, BODY, named))
        await eventually(lambda: len(fleet.specs) == specs)
        fleet.fail(fleet.specs[-1], "decode died", resumable=True)
        await eventually(lambda: len(fleet.specs) == specs + 1)
        return asking

    first = await asked_and_moved(1)
    for spec in fleet.specs:
        await stack.proxy.store.delete(spec.request_id)
    second = await asked_and_moved(3)
    held.hold.set()
    assert [(await one).text for one in (first, second)] == [TEXT, TEXT]
    names = [spec.request_id for spec in fleet.specs]
    assert names == [names[0], f"{names[0]}.1", names[0], f"{names[0]}.2"]


async def test_a_request_that_makes_progress_is_no_suspect(stack):

    def lose(spec):
        stack.fleet.suspect(spec, Incarnation("prefill-7", 3))
        stack.fleet.fail(spec, "decode died", resumable=True)

    await disturbed(stack, BODY, lose, after=MIN_KEPT_TOKENS, reply=TEXT * 30)
    assert stack.fleet.specs[1].deaths == ()


async def test_instances_that_leave_in_turn_have_an_end(stack):
    def submitted(spec):
        stack.fleet.place(spec)
        stack.fleet.move(spec)

    stack.fleet.script = Script(on_submit=submitted)
    response = await stack.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "hi"})
    assert response.status_code == 500
    assert len(stack.fleet.specs) == migration.MOST_MOVES + 1


async def test_an_answer_may_make_way_as_often_as_it_takes(stack):
    incarnations = migration.MOST_MOVES + 4

    def submitted(spec):
        stack.fleet.place(spec)
        if len(stack.fleet.specs) < incarnations:
            stack.fleet.move(spec, PREEMPTED)
        else:
            stack.fleet.play_later(spec)

    stack.fleet.script = Script(reply=TEXT, on_submit=submitted)
    response = await stack.http.post(COMPLETIONS, json={"model": MODEL, "prompt": "hi"})
    assert response.json()["choices"][0]["text"] == TEXT
    assert len(stack.fleet.specs) == incarnations
