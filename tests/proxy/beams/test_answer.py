"""Beam search at the API: its steps at the fleet, the answer, and what ends it early."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest

from millrace.core.request_spec import RequestSpec
from millrace.core.token_events import PositionLogprobs, TokenDetail, TokenEvent
from support.gateway import MODEL, Stack, gateway
from support.live_stack import eventually

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
VOCABULARY = range(10, 26)  # ids that the law may choose; all have a text
EOS = 1
BODY: dict[str, Any] = {
    **{"model": MODEL, "prompt": "hi", "use_beam_search": True},
    **{"n": 2, "max_tokens": 3, "return_token_ids": True},
}


def law(ids: Sequence[int], *, ends: bool = False) -> list[tuple[int, float]]:
    """The tokens that may follow others, the likeliest first; the same after the same."""
    rng = random.Random(str(list(ids)))
    weights = {token_id: rng.random() for token_id in VOCABULARY}
    if ends:
        weights[EOS] = 4.0
    total = sum(weights.values())
    ranked = sorted(weights.items(), key=lambda one: -one[1])
    return [(token_id, math.log(weight / total)) for token_id, weight in ranked]


class Model:
    """Answers every step by the law. `refuse_from`: of this step on, requests are refused."""

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self.ends = False
        self.refuse_from = self.hold_from = 99
        self.prompts: dict[str, list[int]] = {}
        self._playing: list[asyncio.Task[None]] = []
        stack.fleet.script.on_submit = self._submitted

    def _submitted(self, spec: RequestSpec) -> None:
        self._playing.append(asyncio.create_task(self._play(spec)))

    async def _play(self, spec: RequestSpec) -> None:
        fleet, step = self.stack.fleet, int(spec.request_id.split("-s")[1].split("-")[0])
        if step >= self.refuse_from:
            fleet.refuse(spec, "overloaded", "The queue is full.", retry_after_s=2.0)
            return
        ids = (await self.stack.proxy.store.prompt_ids(spec.request_id)).tolist()
        self.prompts[spec.request_id] = ids
        fleet.place(spec)
        if step >= self.hold_from:
            return
        found = law(ids, ends=self.ends)[: spec.sampling.logprobs]
        detail = TokenDetail(logprobs=(PositionLogprobs(found[0], found),), cached_tokens=2)
        token = [found[0][0]]
        event = TokenEvent(spec.request_id, 0, token, "length", -1, detail, begins=True)
        fleet.emit(spec.proxy.id, [event])

    def best(self, ids: list[int], width: int, tokens: int) -> list[list[int]]:
        """The likeliest answers of so many tokens that a beam search finds."""
        beams: list[tuple[float, list[int]]] = [(0.0, [])]
        for _ in range(tokens):
            longer = [
                (logprob + more, [*beam, token_id])
                for logprob, beam in beams
                for token_id, more in law(ids + beam)
            ]
            beams = sorted(longer, reverse=True)[:width]
        return [beam for _, beam in beams]


@pytest.fixture
async def stack(tmp_path):
    async with gateway(tmp_path) as running:
        yield running


@pytest.fixture
def model(stack):
    return Model(stack)


async def post(stack, path=COMPLETIONS, status=200, **fields):
    body = {**BODY, **fields}
    if path == CHAT:
        body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
    response = await stack.http.post(path, json=body)
    assert response.status_code == status, response.text
    return response.json()


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_the_likeliest_answers_come_in_order(stack, model, path):
    answer = await post(stack, path, n=3)
    first = model.prompts[f"{answer['id']}-s0"]
    assert [one["token_ids"] for one in answer["choices"]] == model.best(first, 3, 3)
    assert [one["finish_reason"] for one in answer["choices"]] == ["length"] * 3
    assert [one["index"] for one in answer["choices"]] == [0, 1, 2]
    told = answer["usage"]
    assert (told["prompt_tokens"], told["completion_tokens"]) == (len(first), 9)
    assert told["prompt_tokens_details"] == {"cached_tokens": 2}
    texts = [stack.fleet.tokenizer.decode(one["token_ids"]) for one in answer["choices"]]
    shown = [
        one["text"] if path == COMPLETIONS else one["message"]["content"]
        for one in answer["choices"]
    ]
    assert shown == texts


async def test_a_step_is_a_request_of_one_token_for_each_beam(stack, model):
    answer = await post(stack, n=3, millrace={"e2e_slo_ms": 9000, "ttft_slo_ms": 500}, priority=4)
    steps = [f"{answer['id']}-s{step}" for step in range(3)]
    names = [steps[0], *(f"{step}-{beam}" for step in steps[1:] for beam in range(3))]
    assert [spec.request_id for spec in stack.fleet.specs] == names
    for spec in stack.fleet.specs:
        asked = spec.sampling
        assert (asked.max_tokens, asked.n, asked.logprobs, asked.temperature) == (1, 1, 6, 0.0)
        assert (spec.slo.ttft_s, spec.slo.e2e_s, spec.priority) == (0.5, None, 4)
    assert [spec.arrival_unix_s for spec in stack.fleet.specs] == sorted(
        spec.arrival_unix_s for spec in stack.fleet.specs
    )


async def test_every_prompt_has_its_search(stack, model):
    alone = [await post(stack, prompt=text) for text in ("hi", "there")]
    both = await post(stack, prompt=["hi", "there"])
    found = [[one["token_ids"] for one in answer["choices"]] for answer in (*alone, both)]
    assert found[2] == found[0] + found[1]
    assert both["usage"]["completion_tokens"] == 2 * 2 * 3


async def test_a_stop_token_ends_an_answer(stack, model):
    model.ends = True
    answer = await post(stack, length_penalty=0.0)
    stopped = answer["choices"][0]
    assert (stopped["token_ids"], stopped["text"]) == ([EOS], "")
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", EOS)
    going = await post(stack, ignore_eos=True)
    assert {one["finish_reason"] for one in going["choices"]} == {"length"}
    model.ends = False
    stops = {"stop_token_ids": [*VOCABULARY], "ignore_eos": True}
    named = await post(stack, **stops)
    assert [one["stop_reason"] for one in named["choices"]] == [
        *(one["token_ids"][-1] for one in named["choices"])
    ]


async def test_the_length_penalty_chooses_between_short_and_long(stack, model):
    model.ends = True
    short, long = [await post(stack, length_penalty=one) for one in (-8.0, 8.0)]
    assert [len(one["token_ids"]) for one in (short["choices"][0], long["choices"][0])] == [1, 3]


async def test_log_probabilities_are_the_models_own(stack, model):
    answer = await post(stack, logprobs=2)
    first = model.prompts[f"{answer['id']}-s0"]
    for choice in answer["choices"]:
        ids = choice["token_ids"]
        told = choice["logprobs"]
        expected = [dict(law(first + ids[:i]))[token_id] for i, token_id in enumerate(ids)]
        assert told["token_logprobs"] == pytest.approx(expected)
        assert all(2 <= len(top) <= 3 for top in told["top_logprobs"])


@pytest.mark.parametrize("step", [0, 2])
async def test_a_step_that_is_refused_refuses_the_answer(stack, model, step):
    model.refuse_from = step
    response = await stack.http.post(COMPLETIONS, json=BODY)
    assert response.status_code == 429
    assert int(response.headers["retry-after"]) >= 1
    assert "full" in response.json()["error"]["message"]
    await stack.idle()


@pytest.mark.parametrize("step", [0, 1])
async def test_a_client_that_leaves_cancels_the_step(stack, model, step):
    model.hold_from = step
    asking = asyncio.create_task(stack.http.post(COMPLETIONS, json=BODY))
    open_ones = 2 if step else 1
    await eventually(
        lambda: [r.confirmed for r in stack.proxy.gateway.requests] == [True] * open_ones
    )
    held = {request.request_id for request in stack.proxy.gateway.requests}
    asking.cancel()
    await eventually(lambda: {one.request_id for one in stack.fleet.cancels} == held)
    await stack.idle()


async def test_a_running_search_is_a_request_of_its_client(stack, model):
    model.hold_from = 1
    headers = {"x-millrace-request-id": "mine"}
    asking = asyncio.create_task(stack.http.post(COMPLETIONS, json=BODY, headers=headers))
    await eventually(lambda: stack.proxy.gateway.inflight == 2)
    shown = (await stack.http.get("/v1/requests/mine")).json()
    assert (shown["object"], len(model.prompts)) == ("millrace.request", 3)
    asking.cancel()
    await stack.idle()


async def test_a_search_needs_room_for_all_its_beams(tmp_path):
    async with gateway(tmp_path, "proxy.max_inflight=3") as stack:
        Model(stack)
        assert (await post(stack, n=3))["choices"]
        assert (await post(stack, n=4, status=429))["error"]["code"] == "overloaded"


REFUSED: list[tuple[str, Any]] = [
    ("stream", True),
    ("echo", True),
    ("stop", ["a"]),
    ("min_tokens", 1),
    ("logit_bias", {"7": 1}),
    ("allowed_token_ids", [7]),
    ("bad_words", ["a"]),
    ("presence_penalty", 0.5),
    ("frequency_penalty", 0.5),
    ("repetition_penalty", 1.5),
    ("prompt_logprobs", 0),
    ("max_reasoning_tokens", 5),
    ("thinking_token_budget", 5),
    ("best_of", 3),
    ("guided_regex", "a+"),
    ("response_format", {"type": "json_object"}),
]
HARMLESS = {
    "temperature": 0.7,
    "top_p": 0.5,
    "top_k": 3,
    "min_p": 0.1,
    "seed": 4,
    "stop": [],
    "min_tokens": 0,
    "logit_bias": {},
    "bad_words": [],
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "stream": False,
    "echo": False,
    "best_of": 2,
}


@pytest.mark.parametrize(("field", "value"), REFUSED)
async def test_what_a_search_can_not_obey_is_refused_by_name(stack, model, field, value):
    error = (await post(stack, status=400, **{field: value}))["error"]
    assert (error["param"], error["code"]) == (field, "unsupported_parameter")
    assert "use_beam_search" in error["message"]


async def test_what_asks_for_nothing_changes_nothing(stack, model):
    plain, same = await post(stack), await post(stack, **HARMLESS)
    assert [one["token_ids"] for one in same["choices"]] == [
        one["token_ids"] for one in plain["choices"]
    ]


@pytest.mark.parametrize("penalty", [17, -17, "1"])
async def test_a_bad_length_penalty_is_named(stack, model, penalty):
    error = (await post(stack, status=400, length_penalty=penalty))["error"]
    assert error["param"] == "length_penalty"


async def test_a_fleet_that_has_more_to_say_gives_a_step_one_token(stack):
    """The scripted fleet, which fuzzing uses, keeps the limit that every step has."""
    response = await stack.http.post(COMPLETIONS, json=BODY)
    assert response.status_code == 200, response.text
    assert [len(choice["token_ids"]) for choice in response.json()["choices"]] == [3, 3]
    assert {spec.sampling.max_tokens for spec in stack.fleet.specs} == {1}
