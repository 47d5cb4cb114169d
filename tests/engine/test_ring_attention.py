"""A group of instances computes what one alone does, wherever its prompt is cut and spread."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from millrace.core.request import Chunk
from millrace.core.sequence_parallel import PAD, layout
from millrace.engine.loader import load_model
from millrace.engine.model_runner import Boundary, ModelRunner
from millrace.engine.ring_attention import KvBlock, RingTask, ring_task, seen_part
from support.ring_group import LocalRing, Member, RingGroup, plan
from support.tiny_engine import Request, make_pool, make_runner, prefill
from support.tiny_models import VARIANTS, model_folder, prompt

CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def make_runners(
    name: str, count: int, page_tokens: int, dtype: str = "float32"
) -> list[ModelRunner]:
    """Instances that share their weights."""
    model = load_model(model_folder(name), device="cpu", dtype=dtype)
    return [
        ModelRunner(model, make_pool(model, page_tokens=page_tokens, num_pages=1024 // page_tokens))
        for _ in range(count)
    ]


def alone(runner: ModelRunner, tokens: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Logits, and the K/V [layers, 2, heads, tokens, head_dim] of one instance and one pass."""
    request = Request(runner, tokens)
    logits = prefill(runner, request)
    pages = runner.pool.storage[:, request.pages].permute(0, 2, 3, 1, 4, 5).flatten(3, 4)
    kv = pages[:, :, :, : len(tokens)].float()
    runner.pool.free(request.pages)
    return logits, kv


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("sizes", [(1, 2, 3, 4), (2, 4), (3,)])
def test_any_plan_gives_the_logits_and_the_kv_of_one_pass(
    name: str, sizes: tuple[int, ...]
) -> None:
    rng = random.Random(f"{name} {sizes}")
    tokens = prompt(rng.randrange(70, 230), seed=len(name))
    runners = make_runners(name, sizes[-1], rng.choice((4, 8, 16)))
    logits, kv = alone(runners[0], tokens)
    group = RingGroup(
        runners,
        plan(rng, len(tokens), sizes),
        tokens,
        max_chunk_tokens=rng.choice((9, 32, 64)),
        rng=rng,
    )
    ringed = group.run()
    torch.testing.assert_close(ringed, logits, **CLOSE)
    assert ringed.argmax() == logits.argmax()
    torch.testing.assert_close(group.kv()[0], kv, **CLOSE)
    group.free()
    for runner in runners:
        runner.pool.check_integrity(expected_used=0)
