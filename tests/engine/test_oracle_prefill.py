"""Prefill logits of every family and RoPE variant agree with `transformers` to 1e-4 in float32."""

from __future__ import annotations

import random

import pytest
import torch

from support.tiny_engine import Request, make_runner, prefill
from support.tiny_models import VARIANTS, model_folder, oracle, prompt

NAMES = list(VARIANTS)
TOLERANCE = 1e-4


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("length", [1, 2, 17, 300])
def test_last_logits(name: str, length: int) -> None:
    runner = make_runner(model_folder(name))
    ids = prompt(length)
    request = Request(runner, ids)
    expected = oracle(name).logits(ids)
    torch.testing.assert_close(prefill(runner, request), expected[-1], atol=TOLERANCE, rtol=0)
    runner.pool.free(request.pages)
    runner.pool.check_integrity(expected_used=0)


@pytest.mark.parametrize("name", NAMES)
def test_logits_of_every_prompt_position(name: str) -> None:
    runner = make_runner(model_folder(name))
    ids = prompt(90)
    task = Request(runner, ids).task(0, 90)
    task.want_hidden = True
    list(runner.prefill_batch([task]))
    assert task.hidden is not None and task.logits is not None
    expected = oracle(name).logits(ids)
    found = runner.project(task.hidden)
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(task.logits, expected[-1], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(task.hidden, oracle(name).hidden(ids), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("page_tokens", [1, 5, 64])
def test_chunks_at_random_boundaries(name: str, page_tokens: int) -> None:
    length = 150
    rng = random.Random(page_tokens)
    runner = make_runner(model_folder(name), page_tokens=page_tokens, num_pages=200)
    scattered = runner.pool.allocate(200)
    rng.shuffle(scattered)
    ids = prompt(length)
    request = Request(runner, [])
    request.tokens, request.pages = ids, scattered[: runner.pool.layout.pages_for(length)]
    cuts = sorted(rng.sample(range(1, length), 5))
    found = prefill(runner, request, cuts)
    expected = oracle(name).logits(ids)[-1]
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_ragged_batch_of_chunks_with_and_without_history(name: str) -> None:
    runner = make_runner(model_folder(name), num_pages=128)
    prompts = [prompt(length, seed=9) for length in (1, 40, 33, 90)]
    requests = [Request(runner, ids) for ids in prompts]
    histories = (0, 13, 0, 57)
    for request, history in zip(requests, histories, strict=True):
        if history:
            list(runner.prefill_batch([request.task(0, history, want_logits=False)]))
    tasks = [r.task(h, len(r.tokens)) for r, h in zip(requests, histories, strict=True)]
    tasks[2].want_logits = False
    list(runner.prefill_batch(tasks))
    for index, (ids, task) in enumerate(zip(prompts, tasks, strict=True)):
        if index == 2:
            assert task.logits is None
            continue
        expected = oracle(name).logits(ids)[-1]
        torch.testing.assert_close(task.logits, expected, atol=TOLERANCE, rtol=0)


def test_prompt_positions_of_one_task_in_a_batch() -> None:
    name = "qwen2-tied"
    runner = make_runner(model_folder(name))
    prompts = [prompt(length, seed=3) for length in (12, 30, 7)]
    tasks = [Request(runner, ids).task(0, len(ids)) for ids in prompts]
    tasks[1].want_hidden, tasks[1].want_logits = True, False
    list(runner.prefill_batch(tasks))
    assert tasks[1].hidden is not None and tasks[1].logits is None
    expected = [oracle(name).logits(ids) for ids in prompts]
    found = runner.project(tasks[1].hidden)
    torch.testing.assert_close(found, expected[1], atol=TOLERANCE, rtol=0)
    for i in (0, 2):
        assert tasks[i].hidden is None
        torch.testing.assert_close(tasks[i].logits, expected[i][-1], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["llama3-rope-tied", "qwen2-yarn-window", "mixtral"])
def test_a_long_prompt_in_chunks(name: str) -> None:
    runner = make_runner(model_folder(name), num_pages=200)
    ids = prompt(1300)
    found = prefill(runner, Request(runner, ids), cuts=[512, 1024])
    expected = oracle(name).logits(ids)[-1]
    torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)
