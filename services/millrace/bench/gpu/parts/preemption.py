"""Part *preemption*: a prefill that is suspended computes the same bits as one that is not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

from millrace.bench.gpu.part import Context
from millrace.bench.gpu.shapes import FAMILIES
from millrace.bench.gpu.small_engine import Prompt, new_prompt, small_engine, task_of
from millrace.engine.assembly import Engine

_TOKENS: Final = 300
_SLICE_FLOPS: Final = 4e7
"""Of a slice of attention's rows on a GPU, so that the small model's attention has four."""


@torch.inference_mode()
def check(context: Context) -> None:
    """Suspends a pass at every boundary in turn; another prompt runs in between."""
    dtype = "bfloat16" if context.is_cuda else "float32"
    for family in ("llama", "qwen3_moe"):
        with small_engine(FAMILIES[family], str(context.device), dtype) as engine:
            engine.runner.states.slice_flops = _SLICE_FLOPS
            compare(context, engine, family)


def compare(context: Context, engine: Engine, family: str) -> None:
    """Compares logits and K/V of the suspended passes with those of one that runs through."""
    long, short = new_prompt(engine, _TOKENS, 1), new_prompt(engine, 40, 2)
    wanted, boundaries = prefill(engine, long, -1, lambda: None)
    differ = []
    for stop in range(boundaries):
        engine.pool.storage[:, long.pages] = 0
        found, _ = prefill(engine, long, stop, lambda: _run_through(engine, short))
        if not all(map(torch.equal, wanted, found)):
            differ.append(stop)
    detail = f"{boundaries} boundaries" + (f"; other bits after {differ}" if differ else "")
    context.claim(f"{family}: the same bits", not differ and boundaries > 0, detail)


def prefill(
    engine: Engine, prompt: Prompt, stop: int, between: Callable[[], None]
) -> tuple[tuple[Tensor, Tensor], int]:
    """Runs a prefill and calls `between` after the boundary of number `stop`.

    Returns its logits and K/V, and the number of boundaries.
    """
    task = task_of(prompt, 0, len(prompt.ids))
    count = 0
    for count, _ in enumerate(engine.runner.prefill_batch([task]), 1):
        if count - 1 == stop:
            between()
    assert task.logits is not None  # the task asked for logits
    tokens = len(prompt.ids) // engine.layout.page_tokens  # whole pages: the rest is undefined
    kv = engine.pool.storage[:, prompt.pages[:tokens]].clone()
    return (task.logits.clone(), kv), count


def _run_through(engine: Engine, prompt: Prompt) -> None:
    for _ in engine.runner.prefill_batch([task_of(prompt, 0, len(prompt.ids))]):
        pass
