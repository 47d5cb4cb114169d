"""What a decode step promises: rows that don't see each other, and no Python that grows."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType

import pytest
import torch

from millrace.engine.decode_batch import DecodeBatch, Sequence
from millrace.engine.model_runner import ModelRunner
from millrace.engine.sampler import Sampler, SamplingSpec
from support.tiny_engine import Request, decode, make_runner, prefill
from support.tiny_models import model_folder, prompt

LENGTHS = (700, 1, 33, 16, 90, 255, 5, 140)


def kv_of(runner: ModelRunner, request: Request) -> torch.Tensor:
    """The last token's K and V of every layer."""
    page_tokens = runner.pool.layout.page_tokens
    page, offset = divmod(len(request.tokens) - 1, page_tokens)
    return runner.pool.storage[:, request.pages[page], :, :, offset].clone()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["llama3-rope-tied", "mistral-window", "qwen3-moe-mixed"])
def test_a_row_is_the_same_to_the_bit_whatever_the_batch_around_it(name: str, dtype: str) -> None:
    runner = make_runner(model_folder(name), dtype=dtype, num_pages=160)
    requests = [Request(runner, prompt(n, seed=n), room=1) for n in LENGTHS]
    for request in requests:
        prefill(runner, request)
        request.tokens.append(7)
    alone = [(decode(runner, [request])[0], kv_of(runner, request)) for request in requests]
    for size in (2, 3, 5, 8):
        batch = requests[:size][::-1]
        rows = decode(runner, batch)
        for request, row in zip(batch, rows, strict=True):
            logits, kv = alone[requests.index(request)]
            assert torch.equal(row, logits)
            assert torch.equal(kv_of(runner, request), kv)


def calls_of(action: Callable[[], object]) -> Counter[str]:
    """How often each Python function and builtin ran while `action` did."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[getattr(arg, "__qualname__", repr(arg))] += 1

    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
    return calls


def step_calls(context_tokens: int, size: int, name: str) -> Counter[str]:
    """The calls of one greedy step over KV that nobody wrote."""
    pages_each = context_tokens // 16 + 2
    runner = make_runner(model_folder(name), num_pages=size * pages_each)
    batch = DecodeBatch(runner, runner.pool, Sampler(), max_batch=size)
    for number in range(size):
        batch.add(
            Sequence(
                request_id=f"r{number}",
                choice=0,
                pages=runner.pool.allocate(pages_each),
                prompt_tokens=context_tokens,
                first_token_id=number,
                spec=SamplingSpec(max_tokens=16, temperature=0.0),
            )
        )
    batch.step()  # one-time work
    return calls_of(batch.step)


@pytest.mark.parametrize("name", ["llama", "mistral-window"])
@pytest.mark.parametrize("size", [1, 8])
def test_python_does_not_grow_with_the_context(name: str, size: int) -> None:
    assert step_calls(4096, size, name) == step_calls(64, size, name)


def test_a_layer_takes_the_same_few_calls_whatever_the_batch() -> None:
    def per_sequence(calls: Counter[str]) -> int:
        return sum(calls.values())

    few, many = (per_sequence(step_calls(64, size, "llama")) for size in (1, 8))
    assert many - few <= 7 * 16  # a row of sampling and a token of output each
