"""Greedy tokens of every family are those of `transformers`, alone and in a mixed batch."""

from __future__ import annotations

import pytest
import torch

from support.tiny_engine import Request, decode, greedy, make_runner, prefill
from support.tiny_models import VARIANTS, Oracle, model_folder, oracle, prompt

TOKENS = 24
"""From the prompt of 23 tokens past every window, and over ends of pages."""


@pytest.mark.parametrize("name", list(VARIANTS))
def test_greedy_tokens_alone_and_in_a_batch(name: str) -> None:
    runner = make_runner(model_folder(name), num_pages=128)
    prompts = [prompt(length, seed=4) for length in (1, 23, 200)]
    expected = [oracle(name).greedy(ids, TOKENS) for ids in prompts]

    alone = Request(runner, prompts[1], room=TOKENS)
    assert greedy(runner, [alone], TOKENS) == expected[1:2]
    runner.pool.free(alone.pages)

    together = [Request(runner, ids, room=TOKENS) for ids in prompts]
    assert greedy(runner, together, TOKENS) == expected


def test_sequences_join_and_leave_a_batch_without_changing_others() -> None:
    name = "qwen3"
    runner = make_runner(model_folder(name), num_pages=128)
    prompts = [prompt(length, seed=5) for length in (9, 31)]
    expected = [oracle(name).greedy(ids, 24) for ids in prompts]
    first, second = (Request(runner, ids, room=24) for ids in prompts)
    first.tokens.append(int(prefill(runner, first).argmax()))
    for step in range(23):
        batch = [first]
        if step == 5:
            second.tokens.append(int(prefill(runner, second).argmax()))
        if 5 <= step < 15:
            batch = [second, first] if step % 2 else [first, second]
        for request, row in zip(batch, decode(runner, batch), strict=True):
            request.tokens.append(int(row.argmax()))
    assert first.tokens[9:] == expected[0]
    assert second.tokens[31:] == expected[1][:11]


def test_decode_equals_prefill_of_the_same_tokens() -> None:
    runner = make_runner(model_folder("mistral-window"))
    request = Request(runner, prompt(70), room=8)
    prefill(runner, request)
    for token in prompt(8, seed=1):
        request.tokens.append(token)
        stepped = decode(runner, [request])[0]
        fresh = Request(runner, request.tokens)
        torch.testing.assert_close(stepped, prefill(runner, fresh), atol=1e-5, rtol=0)
        runner.pool.free(fresh.pages)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral"])
def test_bfloat16_stays_as_near_to_float32_as_the_oracle(name: str) -> None:
    ids = prompt(120)
    exact = oracle(name).logits(ids)[-1]
    oracle_error = (Oracle(model_folder(name), torch.bfloat16).logits(ids)[-1] - exact).abs().mean()
    runner = make_runner(model_folder(name), dtype="bfloat16")
    request = Request(runner, ids, room=1)
    error = (prefill(runner, request) - exact).abs().mean()
    assert 0 < error < 2 * oracle_error
    request.tokens.append(5)
    stepped = decode(runner, [request])[0]
    exact = oracle(name).logits([*ids, 5])[-1]
    assert (stepped - exact).abs().mean() < 2 * oracle_error
