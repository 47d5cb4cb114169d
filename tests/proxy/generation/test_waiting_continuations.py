"""A continuation waits for its turn, a fleet, the scheduler and the store."""

from __future__ import annotations

import asyncio

import pytest

from millrace.state.store import StoreError
from support.gateway import Script, gateway
from support.live_stack import eventually
from support.migrated_answers import (
    BODY,
    TEXT,
    ask,
    disturbed,
    tokens_of,
    until_finished,
)


@pytest.mark.parametrize("code", ["unavailable", "overloaded", "too_large"])
async def test_a_continuation_waits_for_its_turn(stack, code):
    refused = []

    def refuse_twice(spec):
        refused.append(spec)
        if len(refused) == 2:
            stack.fleet.script = Script(reply=TEXT)
        stack.fleet.refuse(spec, code, "not now")

    def move(spec):
        stack.fleet.script = Script(on_submit=refuse_twice)
        stack.fleet.move(spec)

    answer = await disturbed(stack, BODY, move)
    assert answer.text == TEXT
    assert len({spec.request_id for spec in stack.fleet.specs}) == 2


async def test_a_continuation_waits_until_there_is_a_fleet(tmp_path, short_intervals):
    async with gateway(tmp_path, "proxy.submit_timeout_s=1") as stack:
        asking = asyncio.create_task(
            disturbed(stack, BODY, lambda spec: (stack.fleet.announce(ready=False), None)[1])
        )
        await eventually(lambda: bool(stack.fleet.specs) and not stack.proxy.gateway.ready)
        stack.fleet.move(stack.fleet.specs[0])
        await eventually(lambda: stack.proxy.gateway.parked == 1)
        await eventually(lambda: stack.fleet.parked_requests == 1)
        stack.fleet.announce(ready=True)
        assert (await asking).text == TEXT
        await eventually(lambda: stack.fleet.parked_requests == 0)


async def test_a_continuation_waits_until_its_deadline(tmp_path):
    held = Script(reply=TEXT, hold=asyncio.Event(), hold_after=3)
    limits = "scheduler.request_timeout_s=2", "proxy.submit_timeout_s=1"
    async with gateway(tmp_path, *limits) as stack:
        stack.fleet.script = held
        asking = asyncio.create_task(ask(stack, BODY))
        await eventually(lambda: tokens_of(stack) == 3)
        stack.fleet.announce(ready=False)
        await eventually(lambda: not stack.proxy.gateway.ready)
        stack.fleet.move(stack.fleet.specs[0])
        answer = await asking
        assert "2 s" in answer.error["message"]
        held.hold.set()


async def test_streams_go_on_at_a_scheduler_that_does_not_know_them(stack):
    """The lost scheduler has given up the requests, and its workers have dropped them."""

    async def restart(spec):
        stack.fleet.forgets = True
        await stack.fleet.stop_scheduler()
        await eventually(lambda: not stack.proxy.gateway.connected)
        await stack.fleet.start_scheduler()

    assert (await disturbed(stack, BODY, restart)).text == TEXT


async def test_an_answer_that_moves_while_the_scheduler_is_away_waits_for_it(stack):
    async def restart(spec):
        await stack.fleet.stop_scheduler()
        await eventually(lambda: not stack.proxy.gateway.connected)
        stack.fleet.move(spec)
        stack.fleet.forgets = True
        await stack.fleet.start_scheduler()

    assert (await disturbed(stack, BODY, restart)).text == TEXT
    assert not stack.fleet.reopened or stack.fleet.reopened[0].token_age_s is None


async def test_a_continuation_that_the_scheduler_takes_with_it_moves_again(stack):
    async def restart(spec):
        stack.fleet.script = Script(on_submit=stack.fleet.place)
        stack.fleet.move(spec)
        await eventually(lambda: len(stack.fleet.specs) == 2)
        await stack.fleet.stop_scheduler()
        stack.fleet.script = Script(reply=TEXT)
        stack.fleet.forgets = True
        await stack.fleet.start_scheduler()

    assert (await disturbed(stack, BODY, restart)).text == TEXT
    assert [s.resumed_tokens for s in stack.fleet.specs] == [0, 5, 5]


async def test_a_client_that_leaves_in_between_leaves_nothing(stack):
    writing, go_on = asyncio.Event(), asyncio.Event()
    create = stack.proxy.store.create

    async def slow(request_id, **record):
        writing.set()
        await go_on.wait()
        await create(request_id, **record)

    stack.fleet.script = Script(reply=TEXT, hold=asyncio.Event(), hold_after=5)
    asking = asyncio.create_task(ask(stack, BODY))
    await eventually(lambda: tokens_of(stack) == 5)
    stack.proxy.store.create = slow
    stack.fleet.move(stack.fleet.specs[0])
    await writing.wait()
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await stack.idle()
    go_on.set()
    [spec] = stack.fleet.specs
    await until_finished(stack, spec, "cancelled")

    async def gone():
        return await stack.state_of(f"{spec.request_id}.1") is None

    await eventually(gone)
    assert len(stack.fleet.specs) == 1


async def test_a_continuation_waits_for_the_store(stack):
    """The store takes the record in the end, but its answer is lost: the next call finds it."""
    create, calls = stack.proxy.store.create, []

    async def fail_thrice(request_id, **record):
        calls.append(request_id)
        if len(calls) == 3:
            await create(request_id, **record)
        if len(calls) <= 3:
            raise StoreError("no server")
        await create(request_id, **record)

    def move(spec):
        stack.proxy.store.create = fail_thrice
        stack.fleet.move(spec)

    answer = await disturbed(stack, BODY, move)
    assert (answer.text, len(calls), len(set(calls))) == (TEXT, 4, 1)


async def test_without_the_store_a_continuation_ends_at_its_deadline(tmp_path):
    async def fail(request_id, **record):
        raise StoreError("no server")

    def move(spec):
        stack.proxy.store.create = fail
        stack.fleet.move(spec)

    async with gateway(tmp_path, "scheduler.request_timeout_s=1") as stack:
        answer = await disturbed(stack, BODY, move)
        assert "store" in answer.error["message"]
