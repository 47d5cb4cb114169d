"""The promises of a decode step: rows that don't see each other, and no Python that grows."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable
from types import FrameType

import pytest
import torch

from millrace.engine.decode_batch import DecodeBatch, Sequence
from millrace.engine.forward import recorded_step
from millrace.engine.forward.local_runner import ModelRunner
from millrace.engine.sampling.sampler import Sampler, SamplingSpec
from support.tiny_engine import Request, decode, make_runner, prefill
from support.tiny_models import model_folder, prompt

LENGTHS = (700, 1, 33, 16, 90, 255, 5, 140)


def kv_of(runner: ModelRunner, request: Request) -> torch.Tensor:
    """Returns the last token's K and V of every layer."""
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
    """Returns how often each Python function and builtin ran while `action` did."""
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, arg: object) -> None:
        if event == "call":
            calls[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            calls[getattr(arg, "__qualname__", repr(arg))] += 1

    gc.disable()  # a collection calls what other libraries have asked it to
    sys.setprofile(count)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


def step_calls(context_tokens: int, size: int, name: str) -> Counter[str]:
    """Returns the calls of one greedy step over KV that was never written."""
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


class Steps:
    """Decode steps over tables that stay at their address, as a `DecodeBatch` keeps them."""

    def __init__(self, runner: ModelRunner, requests: list[Request], width: int) -> None:
        self.runner, self.requests = runner, requests
        self.table = torch.zeros(len(requests), width, dtype=torch.int32)
        self.kv_lens = torch.zeros(len(requests), dtype=torch.int32)

    def __call__(self) -> torch.Tensor:
        for row, request in enumerate(self.requests):
            self.table[row, : len(request.pages)] = torch.tensor(request.pages, dtype=torch.int32)
            self.kv_lens[row] = len(request.tokens)
        return self.runner.decode(
            torch.tensor([request.tokens[-1] for request in self.requests]),
            self.kv_lens.long() - 1,
            self.table,
            self.kv_lens,
        )


def started(name: str, dtype: str, lengths: tuple[int, ...]) -> tuple[ModelRunner, list[Request]]:
    runner = make_runner(model_folder(name), dtype=dtype, num_pages=160)
    requests = [Request(runner, prompt(n, seed=n), room=9) for n in lengths]
    for request in requests:
        request.tokens.append(int(prefill(runner, request).argmax()))
    return runner, requests


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name", ["llama", "llama3-rope-tied", "mistral-window", "qwen3", "mixtral"]
)
@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_recorded_step_gives_what_its_operators_give(
    name: str, dtype: str, size: int, replayed: list[None]
) -> None:
    (plain, plain_requests), (runner, requests) = (
        started(name, dtype, LENGTHS[:size]) for _ in range(2)
    )
    step = Steps(runner, requests, width=50)
    for number in range(8):
        if number == 5:  # other pages, so another plan over the same table
            move_last_page(runner, requests[0])
        expected = decode(plain, plain_requests)  # new tables every time: nothing is recorded for
        logits = step()
        assert torch.equal(logits, expected)
        for request, row in zip(requests + plain_requests, [*logits, *logits], strict=True):
            request.tokens.append(int(row.argmax()))
    assert bool(replayed) == (name != "mixtral")


def move_last_page(runner: ModelRunner, request: Request) -> None:
    old, (new,) = request.pages[-1], runner.pool.allocate(1)
    runner.pool.storage[:, new] = runner.pool.storage[:, old]
    runner.pool.storage[:, old] = torch.nan
    request.pages[-1] = new


def test_python_of_a_recorded_step_does_not_grow_with_the_layers(replayed: list[None]) -> None:
    def calls(name: str) -> Counter[str]:
        runner, requests = started(name, "float32", (20,))
        step = Steps(runner, requests, width=4)
        step()
        return calls_of(step)

    assert not any("attn" in call or "proj" in call for call in calls("llama"))
    assert replayed


def test_tables_that_moved_or_widened_are_followed(replayed: list[None]) -> None:
    runner, requests = started("llama", "float32", (33,))
    narrow, wide = (Steps(runner, requests, width) for width in (4, 9))
    expected = narrow()
    assert torch.equal(narrow(), expected)
    assert len(replayed) == 1
    assert torch.equal(wide(), expected)
    assert len(replayed) == 1
    assert torch.equal(wide(), expected)
    assert len(replayed) == 2


def test_a_recorded_step_refuses_a_length_beyond_its_pages(replayed: list[None]) -> None:
    runner, requests = started("llama", "float32", (33,))
    step = Steps(runner, requests, width=4)
    step()
    step()
    assert replayed
    step.kv_lens[0] = 4 * 16 + 1
    with pytest.raises(ValueError, match=r"kv_lens\[0\] = 65"):
        runner.decode(torch.tensor([1]), torch.tensor([5]), step.table, step.kv_lens)


def test_recorded_steps_are_bounded(monkeypatch: pytest.MonkeyPatch, replayed: list[None]) -> None:
    monkeypatch.setattr(recorded_step, "MOST_RECORDED", 4)
    runner, requests = started("llama", "float32", (5,) * 6)
    steps = [Steps(runner, requests[:size], width=1) for size in range(1, 7)]
    for step in steps:
        step()
    assert not replayed
    for step in reversed(steps):
        step()
    assert len(replayed) == 4
