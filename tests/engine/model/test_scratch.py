from __future__ import annotations

import pytest
import torch

from millrace.engine.forward.local_runner import ModelRunner
from millrace.engine.forward.mixed_pass import prompt_tables
from millrace.engine.kv.host_memory import host_zeros
from millrace.engine.model import scratch as scratch_module
from millrace.engine.model.scratch import Scratch
from support.tiny_engine import Request, decode, make_runner, prefill
from support.tiny_models import model_folder, prompt


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Returns the shapes that were new memory, one after another."""
    shapes: list[tuple[int, ...]] = []

    def counted(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        shapes.append(shape)
        return host_zeros(shape, dtype)

    monkeypatch.setattr(scratch_module, "host_zeros", counted)
    return shapes


def test_what_was_given_back_is_used_again(taken: list[tuple[int, ...]]) -> None:
    scratch = Scratch(torch.float32)
    first = scratch.take(3, 4)
    assert scratch.take(3, 4) is not first
    scratch.give(first)
    assert scratch.take(3, 8) is not first
    assert scratch.take(3, 4) is first
    assert taken == [(3, 4), (3, 4), (3, 8)]


def test_only_the_last_number_of_rows_is_kept(taken: list[tuple[int, ...]]) -> None:
    scratch = Scratch(torch.float32)
    three, other = scratch.take(3, 4), scratch.take(3, 4)
    scratch.give(three)
    scratch.give(scratch.take(5, 4))
    scratch.give(other)  # of a pass that was suspended meanwhile
    scratch.take(5, 4)
    scratch.take(3, 4)
    assert taken == [(3, 4), (3, 4), (5, 4), (3, 4)]


@pytest.mark.parametrize("name", ["llama", "mixtral", "qwen3-moe-mixed"])
@pytest.mark.parametrize("want_logits", [True, False])
def test_a_pass_after_another_takes_no_new_memory(
    name: str, want_logits: bool, taken: list[tuple[int, ...]]
) -> None:
    runner = make_runner(model_folder(name), num_pages=128)

    def run() -> None:
        list(
            runner.prefill_batch([Request(runner, prompt(20)).task(0, 20, want_logits=want_logits)])
        )

    run()
    assert 0 < len(taken) <= 6
    taken.clear()
    for _ in range(3):
        run()
    stopped = runner.prefill_batch([Request(runner, prompt(20)).task(0, 20)])
    for _ in range(8):
        next(stopped)
    stopped.close()
    run()
    assert not taken
    scratch = runner.passes.scratch
    assert scratch is not None and scratch.idle <= 7


def test_a_step_after_another_takes_no_new_memory(taken: list[tuple[int, ...]]) -> None:
    runner = make_runner(model_folder("llama"))
    requests = [Request(runner, prompt(20, seed=i), room=4) for i in range(2)]
    for request in requests:
        prefill(runner, request)
        request.tokens.append(3)
    before = decode(runner, requests)
    kept = before.clone()
    taken.clear()
    for request in requests:
        request.tokens.append(5)
    assert not torch.equal(decode(runner, requests), kept)
    assert not taken
    assert torch.equal(before, kept)  # the logits of a step are the caller's


def suspended(runner: ModelRunner, tokens: int, operator: str) -> int:
    """Returns the bytes that a pass holds after `operator` of its second layer."""
    tables = prompt_tables([Request(runner, prompt(tokens)).task(0, tokens)], page_tokens=16)
    state = runner.states.ragged(tables, runner.passes.scratch, is_cut=True)
    for step in runner.passes.operators:
        step.run(state)
        if (step.layer, step.name) == (1, operator):
            break
    held = (getattr(state, name, None) for name in ("x", "residual", "qkv", "attended", "gate_up"))
    return sum(tensor.untyped_storage().nbytes() for tensor in held if tensor is not None)


def test_a_suspended_pass_holds_its_activations_and_nothing_else() -> None:
    runner = make_runner(model_folder("llama"), num_pages=64)
    config = runner.model.config
    widths = {
        "qkv_proj": config.q_size + 2 * config.kv_size,
        "attn": config.q_size,
        "o_proj": config.hidden_size,
        "gate_up_proj": 2 * config.intermediate_size,
        "down_proj": config.hidden_size,
    }
    for operator, width in widths.items():
        assert suspended(runner, 40, operator) == 40 * (width + config.hidden_size) * 4
