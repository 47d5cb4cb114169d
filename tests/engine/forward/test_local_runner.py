from __future__ import annotations

import pytest
import torch

from millrace.core.errors import ModelError
from millrace.engine.forward.local_runner import ModelRunner
from millrace.engine.forward.mixed_pass import prompt_tables
from millrace.engine.forward.passes import Boundary
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.forward.stage_passes import StagePasses
from millrace.engine.model.loader import load_model
from support.tiny_engine import Request, decode, make_pool, make_runner, prefill
from support.tiny_models import model_folder, prompt

DENSE = ["qkv_proj", "attn", "o_proj", "gate_up_proj", "down_proj"]
MOE = ["qkv_proj", "attn", "o_proj", "gate", "experts"]
RESUMED = ["llama3-rope-tied", "mistral-window", "qwen3-moe-mixed"]


def sequence_of(kinds: list[list[str]]) -> list[Boundary]:
    inner = [Boundary(i, name) for i, kind in enumerate(kinds) for name in kind]
    return [Boundary(-1, "embed"), *inner, Boundary(len(kinds), "lm_head")]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama", [DENSE] * 3),
        ("mixtral", [MOE] * 3),
        ("qwen3-moe-mixed", [DENSE, MOE, DENSE, DENSE]),
    ],
)
def test_operators_are_those_of_flowprefill_5_1(name: str, kinds: list[list[str]]) -> None:
    runner = make_runner(model_folder(name))
    boundaries = list(runner.prefill_batch([Request(runner, prompt(20)).task(0, 20)]))
    assert boundaries == sequence_of(kinds)


def test_a_chunk_without_logits_ends_when_its_kv_is_written() -> None:
    runner = make_runner(model_folder("llama"))
    task = Request(runner, prompt(20)).task(0, 20, want_logits=False)
    assert list(runner.prefill_batch([task]))[-1] == Boundary(2, "attn")
    assert task.logits is None


def test_kv_of_a_layer_is_written_once_attn_was_yielded() -> None:
    runner = make_runner(model_folder("qwen3"))
    request = Request(runner, prompt(40))
    for boundary in runner.prefill_batch([request.task(0, 40)]):
        for layer in range(runner.model.config.num_layers):
            kv = runner.pool.layer(layer)[request.pages[:2]]
            written = layer < boundary.layer or (
                layer == boundary.layer and boundary.operator != "qkv_proj"
            )
            assert bool(kv.count_nonzero()) == written, boundary


def disturb(runner: ModelRunner, other: Request) -> None:
    """Runs a whole prefill and a decode step between two operators of another pass."""
    prefill(runner, other)
    other.tokens.append(3)
    decode(runner, [other])
    other.tokens.pop()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", RESUMED)
@pytest.mark.parametrize("want_hidden", [False, True])
def test_stopping_at_any_boundary_and_resuming_changes_nothing(
    name: str, dtype: str, want_hidden: bool
) -> None:
    """Other passes run whole at each boundary; all results are those of an undisturbed run."""
    runner = make_runner(model_folder(name), dtype=dtype, num_pages=128)
    requests = [Request(runner, prompt(60)) for _ in range(2)]
    tasks = [request.task(24, 60) for request in requests]
    for request, task in zip(requests, tasks, strict=True):
        list(runner.prefill_batch([request.task(0, 24, want_logits=False)]))
        task.want_hidden = want_hidden
    undisturbed, disturbed = tasks
    list(runner.prefill_batch([undisturbed]))
    other = Request(runner, prompt(45, seed=2), room=1)
    for _ in runner.prefill_batch([disturbed]):
        disturb(runner, other)
    assert disturbed.logits is not None and undisturbed.logits is not None
    assert torch.equal(disturbed.logits, undisturbed.logits)
    if want_hidden:
        assert disturbed.hidden is not None and undisturbed.hidden is not None
        assert torch.equal(disturbed.hidden, undisturbed.hidden)
    kv, undisturbed_kv = (runner.pool.storage[:, r.pages] for r in requests)
    assert torch.equal(kv, undisturbed_kv)


def test_a_pass_keeps_only_what_a_later_operator_reads() -> None:
    """The output of each operator, by name: the suspended state, and all the memory it holds."""
    runner = make_runner(model_folder("llama"))
    task = Request(runner, prompt(20)).task(0, 20)
    wanted = {
        "embed": {"x"},
        "qkv_proj": {"residual", "qkv"},
        "attn": {"residual", "attended"},
        "o_proj": {"residual", "x"},
        "gate_up_proj": {"residual", "gate_up"},
        "down_proj": {"residual", "x"},
    }
    tables = prompt_tables([task], page_tokens=16)
    state = runner.states.ragged(tables, None, is_cut=True)
    for operator in runner.passes.operators[:-1]:
        operator.run(state)
        held = {
            name
            for name in ("x", "residual", "qkv", "attended", "gate_up", "routing", "hidden")
            if getattr(state, name, None) is not None
        }
        assert held == wanted[operator.name], operator


def test_two_suspended_prefills_advance_in_turns() -> None:
    runner = make_runner(model_folder("mixtral"), num_pages=128)
    prompts = [prompt(37, seed=1), prompt(64, seed=2)]
    expected = [prefill(runner, Request(runner, ids)) for ids in prompts]
    tasks = [Request(runner, ids).task(0, len(ids)) for ids in prompts]
    for _ in zip(*(runner.prefill_batch([task]) for task in tasks), strict=True):
        pass
    for task, logits in zip(tasks, expected, strict=True):
        assert task.logits is not None and torch.equal(task.logits, logits)


def test_a_closed_prefill_leaves_the_pool_usable() -> None:
    runner = make_runner(model_folder("llama"), num_pages=8)
    request = Request(runner, prompt(100))
    boundaries = runner.prefill_batch([request.task(0, 100)])
    for _ in range(7):
        next(boundaries)
    boundaries.close()
    runner.pool.free(request.pages)
    runner.pool.check_integrity(expected_used=0)
    again = prefill(runner, Request(runner, prompt(100)))
    fresh = make_runner(model_folder("llama"))
    assert torch.equal(again, prefill(fresh, Request(fresh, prompt(100))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"token_ids": torch.zeros(0, dtype=torch.int64)}, "at least one token"),
        ({"token_ids": torch.zeros(4, dtype=torch.int32)}, "int64"),
        ({"history_tokens": -1}, "no negative history"),
        ({"history_tokens": 13}, "can't hold 17"),
    ],
)
def test_senseless_tasks_are_refused_before_anything_runs(change: dict, message: str) -> None:
    runner = make_runner(model_folder("llama"))
    fields = {"token_ids": torch.arange(4), "history_tokens": 0, "pages": [0], **change}
    with pytest.raises(ValueError, match=message):
        runner.prefill_batch([PrefillTask(**fields)])


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one task"):
        make_runner(model_folder("llama")).prefill_batch([])


def test_a_pool_of_another_model_is_refused() -> None:
    llama, qwen3 = (load_model(model_folder(n), device="cpu") for n in ("llama", "qwen3"))
    with pytest.raises(ModelError, match="num_kv_heads is 3, the model needs 2"):
        ModelRunner(StagePasses(llama, make_pool(qwen3)))
    with pytest.raises(ModelError, match="dtype is float32, the model needs bfloat16"):
        ModelRunner(
            StagePasses(
                load_model(model_folder("qwen3"), device="cpu", dtype="bfloat16"), make_pool(qwen3)
            )
        )
