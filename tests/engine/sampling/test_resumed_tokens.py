"""An answer that is resumed equals an answer that was never disturbed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from millrace.core.token_events import PositionLogprobs
from millrace.engine.decode_batch import DecodeBatch, Sequence
from millrace.engine.sampling.sampler import Sampler, SamplingRow, SamplingSpec, finish_reason
from support.tiny_engine import Request, make_runner, prefill
from support.tiny_models import model_folder, prompt

TOKENS = 80  # draws are made 64 at a time
MIXED = {
    "temperature": 1.2,
    "seed": 9,
    "repetition_penalty": 1.2,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "logit_bias": {40: 2.0, 41: -5.0},
}
OPTIONS = {
    "greedy": {"temperature": 0.0, "logprobs": 2},
    "sampled": {"temperature": 1.3, "seed": 7, "logprobs": 0},
    "filtered": {"temperature": 1.5, "seed": 8, "top_k": 40, "top_p": 0.95, "min_p": 0.01},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.4},
    "presence": {"temperature": 0.0, "presence_penalty": 1.5},
    "frequency": {"temperature": 0.9, "seed": 3, "frequency_penalty": 0.7},
    "bias": {"temperature": 0.0, "logit_bias": {33: 1.5, 34: -100.0}},
    "mixed": MIXED,
}

Generated = tuple[list[int], list[PositionLogprobs | None], str]


@pytest.fixture(scope="module")
def runner():
    return make_runner(model_folder("qwen3"))


def generate(runner, ids: list[int], spec: SamplingSpec) -> Generated:
    """Returns tokens, their log probabilities and the finish reason: prefill, then a decode
    batch."""
    request = Request(runner, ids, room=spec.max_tokens)
    row = SamplingRow.first(spec, 0, ids)
    first = Sampler().sample(prefill(runner, request)[None], [row])
    tokens, logprobs = list(first.token_ids), list(first.logprobs)
    reason = finish_reason(spec, 1, tokens[0])
    batch = DecodeBatch(runner, runner.pool, Sampler(), max_batch=1)
    if not reason:
        batch.add(
            Sequence(
                request_id="r",
                choice=0,
                pages=request.pages,
                prompt_tokens=len(ids),
                first_token_id=tokens[0],
                spec=spec,
                prompt_ids=torch.tensor(ids),
            )
        )
    while batch.size:
        (out,) = batch.step()
        tokens.append(out.token_id)
        logprobs.append(out.logprobs)
        reason = out.finish_reason
    runner.pool.free(request.pages)
    return tokens, logprobs, reason


def continued(runner, ids: list[int], spec: SamplingSpec, before: list[int]) -> Generated:
    """Returns the rest of the answer after a resumption with `before`."""
    rest = replace(
        spec,
        max_tokens=spec.max_tokens - len(before),
        min_tokens=max(spec.min_tokens - len(before), 0),
        resumed_tokens=len(before),
    )
    return generate(runner, ids + before, rest)


def same(found: list[PositionLogprobs | None], expected: list[PositionLogprobs | None]) -> bool:
    return all(
        a == b if a is None or b is None else a.chosen[1] == pytest.approx(b.chosen[1], abs=1e-4)
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize("name", list(OPTIONS))
def test_the_rest_is_what_an_undisturbed_run_gives(runner, name: str) -> None:
    ids = prompt(37, seed=2)
    spec = SamplingSpec(max_tokens=TOKENS, **{"temperature": 1.0, **OPTIONS[name]})
    tokens, logprobs, reason = generate(runner, ids, spec)
    assert (len(tokens), reason) == (TOKENS, "length")
    for cut in (1, 20, 65, TOKENS - 1):
        rest = continued(runner, ids, spec, tokens[:cut])
        assert rest[0] == tokens[cut:]
        assert same(rest[1], logprobs[cut:])
        assert rest[2] == "length"


@pytest.mark.parametrize("least", [0, 12, 30])
def test_stop_tokens_stay_barred_up_to_min_tokens(runner, least: int) -> None:
    ids = prompt(21, seed=6)
    free = generate(runner, ids, SamplingSpec(max_tokens=40, temperature=0.0))[0]
    spec = SamplingSpec(
        max_tokens=40,
        temperature=0.0,
        min_tokens=least,
        stop_token_ids=(free[15], free[31]),
        presence_penalty=0.1,
    )
    tokens, _, reason = generate(runner, ids, spec)
    for cut in range(1, len(tokens), 5):
        rest = continued(runner, ids, spec, tokens[:cut])
        assert (rest[0], rest[2]) == (tokens[cut:], reason)


def test_penalties_on_resumed_tokens_need_them() -> None:
    spec = SamplingSpec(max_tokens=4, frequency_penalty=0.5, resumed_tokens=2)
    assert spec.needs_prompt_ids
    with pytest.raises(ValueError, match="token ids"):
        SamplingRow.first(spec)
    assert not SamplingSpec(max_tokens=4, resumed_tokens=2).needs_prompt_ids
