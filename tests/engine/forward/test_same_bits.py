"""A token's logits have the same bits in any company, in any chunks, from prefill and decode."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from millrace_kernels import cpu_backend, determinism
from millrace_kernels.determinism import Alike
from support.ring_group import RingGroup, plan
from support.tiny_engine import Request, in_company, make_runner, prefill
from support.tiny_models import model_folder, prompt

FAMILIES = ["llama", "mistral-window", "qwen3-layer-types", "mixtral"]
FASTEST, *OTHERS = [*cpu_backend.instruction_sets(), "torch"]
#: The fastest and the slowest compute every family; the others the one with all kinds of layers.
CASES = [
    (kernels, name)
    for kernels in (FASTEST, *OTHERS)
    for name in (FAMILIES if kernels in (FASTEST, "torch") else ["mixtral"])
]


@pytest.fixture
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Uses an instruction set, or torch as where the C++ module is not built."""
    if request.param == "torch":
        monkeypatch.setattr(cpu_backend, "TYPES", {})
        yield
    else:
        with cpu_backend.instruction_set(request.param):
            yield
    determinism.use(Alike.NOWHERE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kernels", "name"), CASES, indirect=["kernels"])
def test_random_batches_give_the_bits_of_one_prefill(kernels: None, name: str, dtype: str) -> None:
    chance = random.Random(name)
    runner = make_runner(model_folder(name), num_pages=100, dtype=dtype, alike=Alike.PASSES)
    prompts = [prompt(chance.randint(1, 100), seed=n) for n in range(7)]
    requests = [Request(runner, ids, room=8) for ids in prompts]
    logits = in_company(runner, requests, 4, chance)
    for ids, request, rows in zip(prompts, requests, logits, strict=True):
        for count, row in enumerate(rows):
            alone = Request(runner, request.tokens[: len(ids) + count])
            assert torch.equal(prefill(runner, alone), row)
            runner.pool.free(alone.pages)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kernels", sorted({FASTEST, "torch"}), indirect=True)
def test_chunks_over_several_spans_give_the_bits_of_one_prefill(kernels: None, dtype: str) -> None:
    runner = make_runner(model_folder("llama"), num_pages=200, dtype=dtype, alike=Alike.PASSES)
    ids = prompt(1100)
    whole = prefill(runner, Request(runner, ids))
    for cuts in ((1099,), (7, 512, 520, 1024), (600, 1090)):
        request = Request(runner, ids)
        assert torch.equal(prefill(runner, request, cuts), whole)
        runner.pool.free(request.pages)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("kernels", "name"), CASES, indirect=["kernels"])
def test_groups_give_the_bits_of_one_instance(kernels: None, name: str, dtype: str) -> None:
    chance = random.Random(name)
    runners = [
        make_runner(model_folder(name), num_pages=300, dtype=dtype, alike=Alike.GROUPS)
        for _ in range(4)
    ]
    for tokens, sizes in ((1100, (1, 2)), (1300, (2, 3)), (190, (4,))):
        ids = prompt(tokens)
        request = Request(runners[0], ids)
        whole = prefill(runners[0], request)
        runners[0].pool.free(request.pages)
        group = RingGroup(
            runners[: sizes[-1]],
            plan(chance, tokens, sizes),
            ids,
            max_chunk_tokens=chance.choice((33, 160, 512)),
            rng=chance,
        )
        assert torch.equal(group.run(), whole)
        group.free()
