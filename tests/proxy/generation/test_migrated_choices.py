"""Every choice of an answer is migrated for itself."""

from __future__ import annotations

import asyncio

import pytest

from support.deadlines import HANG_S
from support.gateway import Script
from support.live_stack import eventually
from support.migrated_answers import (
    BODY,
    DISTURBANCES,
    TEXT,
    ask,
    disturbed,
    tokens_of,
)

CHOICES = {**BODY, "n": 3, "logprobs": 1, "return_token_ids": True, "echo": True, "seed": 4}
REPLIES = {"reply": TEXT, "others": ("Hi", "Others say more, grüße")}


def by_choice(answer):
    """The chunks of each choice, in order; chunks without output left out."""
    found = {}
    for choice in answer.choices:
        found.setdefault(choice["index"], []).append(choice)
    return found


@pytest.mark.parametrize("kind", list(DISTURBANCES))
@pytest.mark.parametrize("body", [{**BODY, "n": 3}, CHOICES], ids=["text", "log probabilities"])
async def test_every_choice_goes_its_own_way(stack, kind, body):
    """Choice 1 has finished before; choices 0 and 2 are migrated, a request each."""
    stack.fleet.script = Script(**REPLIES)
    expected = await ask(stack, body)
    held = Script(**REPLIES, hold=asyncio.Event(), hold_after=6)
    stack.fleet.specs.clear()
    stack.fleet.script = held
    asking = asyncio.create_task(ask(stack, body))
    await eventually(lambda: tokens_of(stack) == 6 + 3 + 6)
    stack.fleet.script = Script(**REPLIES)
    if (found := DISTURBANCES[kind](stack.fleet)(stack.fleet.specs[0])) is not None:
        await found
    await eventually(lambda: len(stack.fleet.specs) == 3)
    held.hold.set()  # the earlier incarnation still sends tokens: nobody reads them
    answer = await asyncio.wait_for(asking, HANG_S)

    whole, *parts = stack.fleet.specs
    assert by_choice(answer) == by_choice(expected)
    assert (answer.usage, answer.error, answer.ids) == (expected.usage, None, {whole.request_id})
    assert {part.request_id for part in parts} == {
        f"{whole.request_id}.c{number}.1" for number in (0, 2)
    }
    assert sorted(part.sampling.first_choice for part in parts) == [0, 2]
    for part in parts:
        assert (part.sampling.n, part.resumed_tokens) == (1, 6)
        assert part.sampling.seed == whole.sampling.seed
        assert part.prompt_tokens == whole.prompt_tokens + 6


async def hold_parts(stack, body, after=4, more=7):
    """Asks, and migrates all choices after so many tokens; they wait again after `more` tokens."""
    stack.fleet.script = Script(reply=TEXT, hold=asyncio.Event(), hold_after=after)
    asking = asyncio.create_task(ask(stack, body))
    await eventually(lambda: tokens_of(stack) == after * body["n"])
    again = Script(reply=TEXT, hold=asyncio.Event(), hold_after=more)
    stack.fleet.script = again
    stack.fleet.move(stack.fleet.specs[0])
    await eventually(lambda: tokens_of(stack) == more * body["n"])
    return asking, again


async def test_the_former_record_ends_when_all_choices_are_stored(stack):
    """The second choice is stored after the first has finished: its record ends as first."""
    store, log, first_ended = stack.proxy.store, [], asyncio.Event()
    create, finish = store.create, store.finish

    async def late(request_id, **record):
        if request_id.endswith(".c1.1"):
            await first_ended.wait()
        await create(request_id, **record)
        log.append(("stored", request_id))

    async def logged(states):
        log.extend(("ended", request_id) for request_id in states)
        if any(request_id.endswith(".c0.1") for request_id in states):
            first_ended.set()
        return await finish(states)

    def move(spec):
        store.create, store.finish = late, logged
        stack.fleet.move(spec)

    answer = await disturbed(stack, {**BODY, "n": 2}, move)
    assert {k: "".join(c["text"] for c in v) for k, v in by_choice(answer).items()} == {
        0: TEXT,
        1: TEXT,
    }
    whole = stack.fleet.specs[0].request_id
    await eventually(lambda: ("ended", whole) in log)
    assert log.index(("ended", f"{whole}.c0.1")) < log.index(("stored", f"{whole}.c1.1"))
    assert log.index(("stored", f"{whole}.c1.1")) < log.index(("ended", whole))


async def test_a_choice_that_was_migrated_is_migrated_again(stack):
    asking, held = await hold_parts(stack, {**BODY, "n": 2})
    whole, _, second = stack.fleet.specs
    stack.fleet.script = Script(reply=TEXT)
    stack.fleet.move(second)
    await eventually(lambda: len(stack.fleet.specs) == 4)
    held.hold.set()
    answer = await asking
    assert {k: "".join(c["text"] for c in v) for k, v in by_choice(answer).items()} == {
        0: TEXT,
        1: TEXT,
    }
    third = stack.fleet.specs[3]
    assert third.request_id == f"{whole.request_id}.c1.2"
    assert (third.resumed_tokens, third.sampling.first_choice) == (7, 1)
    text = (await stack.http.get("/metrics")).text
    for line in (
        'millrace_proxy_moved_requests_total{model="tiny",reason="moved"} 2.0',
        'millrace_proxy_finished_requests_total{model="tiny",reason="stop"} 1.0',
        'millrace_proxy_e2e_seconds_count{model="tiny",slo_class="default"} 1.0',
        'millrace_proxy_inflight_requests{model="tiny"} 0.0',
    ):
        assert line in text


async def test_a_response_of_migrated_choices_is_still_one_request(stack):
    asking, held = await hold_parts(stack, {**BODY, "n": 2})
    gateway = stack.proxy.gateway
    [whole] = gateway.of_response(stack.fleet.specs[0].request_id)
    assert (gateway.inflight, whole.completion_tokens) == (2, 14)
    held.hold.set()
    assert (await asking).error is None
    assert gateway.of_response(whole.request_id) == []


async def test_a_client_that_leaves_migrated_choices_leaves_nothing(stack):
    asking, _ = await hold_parts(stack, {**BODY, "n": 2})
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await stack.idle()
    parts = {spec.request_id for spec in stack.fleet.specs[1:]}
    await eventually(lambda: parts <= {cancel.request_id for cancel in stack.fleet.cancels})
    for part in parts:
        assert await stack.state_of(part) is None


async def test_a_migrated_choice_that_fails_ends_the_others(stack):
    asking, _ = await hold_parts(stack, {**BODY, "n": 2})
    _, first, second = stack.fleet.specs
    stack.fleet.fail(second, "it took too long")
    answer = await asking
    assert answer.error["message"] == "it took too long"
    await stack.idle()
    await eventually(lambda: first.request_id in {c.request_id for c in stack.fleet.cancels})
