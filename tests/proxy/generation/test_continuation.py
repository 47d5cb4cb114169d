"""An answer whose decode instance is gone is migrated without an effect for its client."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import partial

import numpy as np
import orjson
import pytest

from millrace.core.backoff import Backoff
from millrace.core.incarnation import Incarnation
from millrace.core.request import MIN_KEPT_TOKENS, Slo
from millrace.core.request_spec import RequestSpec, SamplingParams
from millrace.event_lines import event_lines
from millrace.proxy.fleet import migration
from millrace.proxy.generation.continuation import continuation
from millrace.state.store import StoreError
from millrace.wire.moves import PREEMPTED
from support.deadlines import HANG_S
from support.gateway import MODEL, Script, gateway, token_event
from support.live_stack import eventually

COMPLETIONS = "/v1/completions"
TEXT = "Hello there, grüße"
BODY = {"model": MODEL, "prompt": "hi", "stream": True, "stream_options": {"include_usage": True}}
TRACED = {"x-millrace-trace": "1"}


@pytest.fixture
def short_intervals(monkeypatch):
    monkeypatch.setattr("millrace.proxy.fleet.gateway.WATCH_INTERVAL_S", 0.05)
    monkeypatch.setattr("millrace.proxy.fleet.parking.REPORT_INTERVAL_S", 0.05)


@pytest.fixture
async def stack(tmp_path, short_intervals):
    async with gateway(tmp_path) as running:
        yield running


class Answer:
    """A streamed answer that the client received."""

    def __init__(self, chunks):
        self.chunks = chunks
        self.ids = {chunk["id"] for chunk in chunks if "id" in chunk}
        self.choices = [c for chunk in chunks for c in chunk.get("choices", ())]
        self.text = "".join(choice["text"] for choice in self.choices)
        self.usage = chunks[-1].get("usage")
        self.trace = chunks[-1].get("millrace", {})
        self.error = chunks[-1].get("error")

    @property
    def finish_reason(self):
        return self.choices[-1]["finish_reason"]

    @property
    def token_ids(self):
        return [i for choice in self.choices for i in choice.get("token_ids", ())]

    @property
    def logprobs(self):
        return [x for c in self.choices if c.get("logprobs") for x in c["logprobs"]["tokens"]]


async def ask(stack, body, headers=None):
    async with stack.http.stream("POST", COMPLETIONS, json=body, headers=headers) as response:
        assert response.status_code == 200
        lines = [line async for line in event_lines(response)]
    return Answer([orjson.loads(line[6:]) for line in lines if line[:7] == "data: {"])


async def undisturbed(stack, body):
    stack.fleet.script = Script(reply=TEXT)
    return await ask(stack, body)


async def disturbed(stack, body, disturb, after=5, headers=None, reply=TEXT):
    """Returns the answer if `disturb(spec)` runs after `after` tokens per choice."""
    held = Script(reply=reply, hold=asyncio.Event(), hold_after=after)
    many = after * body.get("n", 1)
    stack.fleet.specs.clear()
    stack.fleet.script = held
    asking = asyncio.create_task(ask(stack, body, headers))
    await eventually(lambda: stack.proxy.gateway.inflight > 0 and tokens_of(stack) == many)
    stack.fleet.script = Script(reply=reply)
    found = disturb(stack.fleet.specs[0])
    if found is not None:
        await found
    await eventually(lambda: len(stack.fleet.specs) > 1 or asking.done())
    held.hold.set()  # the earlier incarnation still sends tokens: nobody reads them
    return await asyncio.wait_for(asking, HANG_S)


def tokens_of(stack):
    return sum(r.completion_tokens for r in stack.proxy.gateway.requests)


async def restart_decode(fleet):
    await fleet.stop_decode()
    await fleet.start_decode()


DISTURBANCES = {
    "moved": lambda fleet: fleet.move,
    "broken": lambda fleet: lambda spec: restart_decode(fleet),
    "failed": lambda fleet: lambda spec: fleet.fail(spec, "decode died", resumable=True),
    "placed again": lambda fleet: fleet.place,
}


@pytest.mark.parametrize("kind", list(DISTURBANCES))
async def test_the_client_sees_one_answer(stack, kind):
    expected = await undisturbed(stack, BODY)
    answer = await disturbed(stack, BODY, DISTURBANCES[kind](stack.fleet), headers=TRACED)
    assert (answer.text, answer.usage) == (expected.text, expected.usage)
    assert (answer.text, answer.finish_reason) == (TEXT, "stop")
    first, second = stack.fleet.specs
    assert answer.ids == {first.request_id}
    assert second.request_id == f"{first.request_id}.1"
    spans = [span["name"] for span in answer.trace["spans"]]
    assert spans.count("moved") == 1
    assert answer.trace["request_id"] == first.request_id
    await eventually(lambda: first.request_id in {c.request_id for c in stack.fleet.cancels})


@pytest.mark.parametrize("after", [1, 8, 14, 15, 16, 17, 19])
async def test_text_stop_strings_ids_and_log_probabilities_cross_the_seam(stack, after):
    """After 14 to 16 tokens the seam is inside a character, or next to it."""
    body = {**BODY, "logprobs": 2, "return_token_ids": True, "echo": True}
    for stop in ([], ["re, gr"], ["üß"]):
        expected = await undisturbed(stack, {**body, "stop": stop})
        if expected.usage["completion_tokens"] <= after:
            continue  # it has ended before
        answer = await disturbed(stack, {**body, "stop": stop}, stack.fleet.move, after)
        assert answer.text == expected.text
        assert answer.token_ids == expected.token_ids
        assert answer.logprobs == expected.logprobs
        assert answer.usage == expected.usage
        assert answer.choices[-1] == expected.choices[-1]


async def test_the_next_incarnation_has_the_prompt_and_what_was_generated(stack):
    def move(spec):
        stack.fleet.script = Script(on_submit=stack.fleet.place)
        stack.fleet.move(spec)

    body = {**BODY, "max_tokens": 30, "min_tokens": 8, "logprobs": 1, "echo": True}
    headers = {"x-millrace-ttft-slo-ms": "500", "x-millrace-tbt-slo-ms": "50"}
    asking = asyncio.create_task(disturbed(stack, body, move, headers=headers))
    await eventually(lambda: len(stack.fleet.specs) == 2)
    first, second = stack.fleet.specs
    stored = await stack.proxy.store.prompt_ids(second.request_id)
    assert stored.size == second.prompt_tokens == first.prompt_tokens + 5
    assert second.resumed_tokens == 5
    assert (second.sampling.max_tokens, second.sampling.min_tokens) == (25, 3)
    assert (second.sampling.seed, second.sampling.logprobs) == (first.sampling.seed, 1)
    assert (first.sampling.prompt_logprobs, second.sampling.prompt_logprobs) == (1, -1)
    assert (second.slo.ttft_s, second.slo.tbt_s) == (None, first.slo.tbt_s)
    assert second.arrival_unix_s == first.arrival_unix_s
    await until_finished(stack, first, "cancelled")

    stack.fleet.script = Script(reply=TEXT)
    stack.fleet.move(second)  # before a token of this incarnation
    assert (await asking).finish_reason == "stop"
    third = stack.fleet.specs[2]
    assert third.request_id == f"{first.request_id}.2"
    assert (third.resumed_tokens, third.prompt_tokens) == (5, second.prompt_tokens)
    await until_finished(stack, third, "finished")


async def until_finished(stack, spec, state):
    async def holds():
        return await stack.state_of(spec.request_id) == state

    await eventually(holds)


async def test_a_continuation_is_continued(stack):
    held = Script(reply=TEXT, hold=asyncio.Event(), hold_after=9)

    def move(spec):
        stack.fleet.script = held
        stack.fleet.move(spec)

    asking = asyncio.create_task(disturbed(stack, BODY, move))
    await eventually(lambda: tokens_of(stack) == 9)
    stack.fleet.script = Script(reply=TEXT)
    stack.fleet.move(stack.fleet.specs[1])
    assert (await asking).text == TEXT
    assert [spec.resumed_tokens for spec in stack.fleet.specs] == [0, 5, 9]
    assert len({s.prompt_tokens + s.sampling.max_tokens for s in stack.fleet.specs}) == 1


async def test_prompts_of_one_request_move_each_for_itself(stack):
    body = {**BODY, "prompt": ["a", "b"]}
    expected = await undisturbed(stack, body)
    held = Script(reply=TEXT, hold=asyncio.Event(), hold_after=5)
    stack.fleet.specs.clear()
    stack.fleet.script = held
    asking = asyncio.create_task(ask(stack, body))
    await eventually(lambda: tokens_of(stack) == 10)
    stack.fleet.script = Script(reply=TEXT)
    [moved] = [spec for spec in stack.fleet.specs if spec.request_id.endswith("-1")]
    stack.fleet.move(moved)
    await eventually(lambda: len(stack.fleet.specs) == 3)
    held.hold.set()
    answer = await asking
    assert stack.fleet.specs[2].request_id == f"{moved.request_id}.1"
    for index in (0, 1):
        text = "".join(c["text"] for c in answer.choices if c["index"] == index)
        assert text == TEXT
    assert answer.usage == expected.usage


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


async def test_what_failed_for_good_ends(stack):
    answer = await disturbed(stack, BODY, lambda spec: stack.fleet.fail(spec, "it took too long"))
    assert answer.error["message"] == "it took too long"
    assert len(stack.fleet.specs) == 1


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


async def test_a_continuation_whose_id_is_taken_ends(stack):
    async def move(spec):
        await stack.proxy.store.create(
            f"{spec.request_id}.1", spec=b"another", prompt_ids=np.ones(3, dtype=np.int32)
        )
        stack.fleet.move(spec)

    answer = await disturbed(stack, BODY, move)
    assert answer.error["code"] == "request_id_taken"


async def test_without_the_store_a_continuation_ends_at_its_deadline(tmp_path):
    async def fail(request_id, **record):
        raise StoreError("no server")

    def move(spec):
        stack.proxy.store.create = fail
        stack.fleet.move(spec)

    async with gateway(tmp_path, "scheduler.request_timeout_s=1") as stack:
        answer = await disturbed(stack, BODY, move)
        assert "store" in answer.error["message"]


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
        said = partial(token_event, spec, 0, script=script, last=False, stops=False)
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
    said = partial(token_event, spec, 0, script=script, last=False, stops=False)
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


async def test_metrics_count_one_request(stack):
    await disturbed(stack, BODY, stack.fleet.move)
    text = (await stack.http.get("/metrics")).text
    for line in (
        'millrace_proxy_moved_requests_total{model="tiny",reason="moved"} 1.0',
        'millrace_proxy_ttft_seconds_count{model="tiny",slo_class="default"} 1.0',
        'millrace_proxy_e2e_seconds_count{model="tiny",slo_class="default"} 1.0',
        'millrace_proxy_inflight_requests{model="tiny"} 0.0',
        'millrace_proxy_parked_requests{model="tiny"} 0.0',
    ):
        assert line in text


def test_what_is_left_of_a_request():
    sampling = SamplingParams(max_tokens=9, min_tokens=3, prompt_logprobs=2)
    spec = RequestSpec(
        request_id="r",
        proxy=Incarnation("x", 1),
        prompt_tokens=10,
        sampling=sampling,
        slo=Slo(ttft_s=1.0, tbt_s=0.5),
        resumed_tokens=2,
    )
    rest = continuation(spec, "r.2", 4)
    assert (rest.prompt_tokens, rest.resumed_tokens) == (14, 6)
    assert (rest.sampling.max_tokens, rest.sampling.min_tokens) == (5, 0)
    assert rest.sampling.prompt_logprobs == -1
    assert rest.slo == Slo(ttft_s=None, tbt_s=0.5)
    assert continuation(spec, "r.2", 0) == replace(spec, request_id="r.2")


@pytest.mark.parametrize(("left_s", "e2e_s"), [(1.5, 1.5), (-2.0, 0.001)])
def test_of_an_end_to_end_objective_the_rest_has_what_is_left(left_s, e2e_s):
    spec = RequestSpec(
        request_id="r",
        proxy=Incarnation("x", 1),
        prompt_tokens=10,
        sampling=SamplingParams(max_tokens=9),
        slo=Slo(ttft_s=1.0, e2e_s=4.0),
    )
    assert continuation(spec, "r.2", 4, left_s).slo == Slo(e2e_s=e2e_s)
    assert continuation(spec, "r.2", 0, left_s).slo == Slo(ttft_s=1.0, e2e_s=e2e_s)
