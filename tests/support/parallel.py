"""Tiny models that split four ways, and groups of ranks that run them."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from millrace.core.kv.layout import KvLayout
from millrace.engine.forward.local_runner import ModelRunner
from millrace.engine.forward.passes import Boundary
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.parallel.group_passes import GroupPasses, load_ranks
from millrace.engine.parallel.kv_memory import new_memory
from millrace.engine.parallel.rank_group import RankGroup
from millrace.engine.runner import Runner
from support.tiny_engine import Request, decode, layout_of, prefill
from support.tiny_models import VARIANTS, model_folder, prompt

#: Every family, window, bias, tied embedding and mixture; qwen2 has one head per rank at 2.
SPLIT_FOUR_WAYS = {
    "llama-mha-sharded": (8, 8),
    "llama3-rope-tied": (8, 4),
    "llama-linear-biased": (4, 4),
    "mistral-window": (8, 4),
    "qwen2-yarn-window": (8, 2),
    "qwen3-layer-types": (4, 4),
    "mixtral": (8, 4),
    "qwen3-moe-mixed": (4, 4),
}


def split_folder(name: str) -> Path:
    """The folder of a variant with (attention heads, KV heads) that four ranks can share."""
    heads, kv_heads = SPLIT_FOUR_WAYS[name]
    variant = VARIANTS[name]
    counts = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    VARIANTS[f"{name}-split"] = replace(variant, overrides={**variant.overrides, **counts})
    return model_folder(f"{name}-split")


def open_runner(
    group: RankGroup,
    folder: Path,
    *,
    dtype: str = "float32",
    num_pages: int = 64,
    page_tokens: int = 16,
    own_pools: bool = False,
    **load: Any,
) -> ModelRunner:
    """A runner over memory that all ranks share, or over pools of their own."""
    model = load_ranks(group, folder, dtype=dtype, **load)
    layout = layout_of(model, num_pages, page_tokens)
    if own_pools:
        return ModelRunner(GroupPasses(group, model, layout))
    handle = new_memory(layout)
    try:
        return ModelRunner(GroupPasses(group, model, layout, handle=handle))
    finally:
        os.close(handle)


def whole_layout(part: KvLayout, ranks: int) -> KvLayout:
    """The layout of an instance whose ranks have pools of their own, given rank 0's."""
    parts = min(ranks, part.num_kv_heads)
    return replace(
        part, head_start=0, head_count=part.num_kv_heads, parts=parts, copies=ranks // parts
    )


@dataclass(eq=False)
class _Job:
    """A request in three chunks, and its suspended pass."""

    request: Request
    seed: int
    start: int = 0
    task: PrefillTask | None = None
    steps: Iterator[Boundary] | None = None


def storm(runner: Runner, jobs: int, seed: int, lengths: tuple[int, int]) -> None:
    """Preempts, resumes, reorders and gives up passes at random operators, with decodes between.

    Every pass is left after its first operator at least. Every job must end with the logits that
    the same runner computed for it undisturbed, and every decode with the same row.
    """
    rng = random.Random(seed)
    sizes = [rng.randint(*lengths) for _ in range(jobs)]
    expected = []
    for i, size in enumerate(sizes):
        request = Request(runner, prompt(size, seed=i))
        expected.append(prefill(runner, request, (size // 3, size // 2)))
        runner.pool.free(request.pages)
    decoded = Request(runner, prompt(9), room=1)
    prefill(runner, decoded)
    decoded.tokens.append(5)
    after = decode(runner, [decoded])
    waiting = [_Job(Request(runner, prompt(n, seed=i)), i) for i, n in enumerate(sizes)]
    while waiting:
        job = rng.choice(waiting[:5])
        if rng.random() < 0.05 and job.steps is not None:
            job.steps.close()
            job.steps = None
        if rng.random() < 0.2:
            assert torch.equal(decode(runner, [decoded]), after), f"seed {seed}"
        if rng.random() < 0.2:
            _order(runner, str(rng.choice(waiting[:5]).seed))
        if job.steps is None:
            _begin(runner, job)
        else:
            _advance(job, rng.randint(1, 12))
        if job.start == len(job.request.tokens):
            assert job.task is not None and job.task.logits is not None
            assert torch.equal(job.task.logits, expected[job.seed]), f"seed {seed}"
            runner.pool.free(job.request.pages)
            waiting.remove(job)
    runner.pool.free(decoded.pages)
    runner.pool.check_integrity(expected_used=0)


def _order(runner: Runner, name: str) -> None:
    """Puts the passes of a name before others, where passes are in flight."""
    if runner.in_flight is not None:
        runner.in_flight.order([name])


def _begin(runner: Runner, job: _Job) -> None:
    """Runs the first operator of the job's next chunk, and suspends the pass there."""
    size = len(job.request.tokens)
    stop = next(s for s in (size // 3, size // 2, size) if s > job.start)
    job.task = job.request.task(job.start, stop, want_logits=stop == size)
    job.task.name = str(job.seed)
    job.steps = runner.prefill_batch([job.task])
    assert next(job.steps, None) is not None, "a pass of no operators"


def _advance(job: _Job, operators: int) -> None:
    """Continues the job's pass, to its end at most."""
    assert job.steps is not None and job.task is not None
    for _ in range(operators):
        if next(job.steps, None) is None:
            job.start += len(job.task.token_ids)
            job.steps = None
            return
