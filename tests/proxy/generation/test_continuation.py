"""An answer whose decode instance is gone is migrated without an effect for its client."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from millrace.core.incarnation import Incarnation
from millrace.core.request import Slo
from millrace.core.request_spec import RequestSpec, SamplingParams
from millrace.proxy.generation.continuation import continuation
from support.gateway import Script
from support.live_stack import eventually
from support.migrated_answers import (
    BODY,
    DISTURBANCES,
    TEXT,
    TRACED,
    ask,
    disturbed,
    tokens_of,
    undisturbed,
    until_finished,
)


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


async def test_what_failed_for_good_ends(stack):
    answer = await disturbed(stack, BODY, lambda spec: stack.fleet.fail(spec, "it took too long"))
    assert answer.error["message"] == "it took too long"
    assert len(stack.fleet.specs) == 1


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
