"""Part *preemption*: a prefill that is suspended computes the same bits as one that is not, and a
short one by CUDA graphs the same as operator by operator."""

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
_ROWS: Final = (16, 128, 512)
"""Rows of passes that are compared with graphs of as many: bits depend on a product's rows."""


@torch.inference_mode()
def check(context: Context) -> None:
    """Suspends a pass at every boundary in turn; another prompt runs in between. On a GPU without
    graphs first, and then by graphs."""
    dtype = "bfloat16" if context.is_cuda else "float32"
    for family in ("llama", "qwen3_moe"):
        with small_engine(FAMILIES[family], str(context.device), dtype) as engine:
            engine.runner.states.slice_flops = _SLICE_FLOPS
            compare(context, engine, family)
            if context.is_cuda:
                compare_graphs(context, engine, family)
                compare(context, engine, f"{family}, by graphs")


def compare_graphs(context: Context, engine: Engine, family: str) -> None:
    """Captures the graphs of short prefills, and compares passes before it and after it."""
    prompts = [new_prompt(engine, rows, rows) for rows in _ROWS]
    wanted = [prefill(engine, prompt, -1, lambda: None)[0] for prompt in prompts]
    engine.runner.capture_prefills()
    counts = engine.runner.states.prefills
    counts.eager.clear()
    for prompt, before in zip(prompts, wanted, strict=True):
        after, _ = prefill(engine, prompt, -1, lambda: None)
        furthest = max(
            float((one - two).abs().max()) for one, two in zip(before, after, strict=True)
        )
        context.claim(
            f"{family}: a prefill of {len(prompt.ids)} rows has the same bits by graphs",
            all(map(torch.equal, before, after)),
            f"largest difference {furthest:.2g}",
        )
        engine.pool.free(prompt.pages)
    is_all = counts.graph == len(prompts) and not counts.eager
    context.claim(f"{family}: the graphs ran", is_all, f"{counts.graph}, others {counts.eager}")


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
    # [layers, pages, 2, heads, page_tokens, head_dim]; what follows the prompt is undefined.
    pages = engine.pool.storage[:, prompt.pages].permute(0, 2, 3, 5, 1, 4)
    kv = pages.flatten(-2)[..., : len(prompt.ids)].clone()
    return (task.logits.clone(), kv), count


def _run_through(engine: Engine, prompt: Prompt) -> None:
    for _ in engine.runner.prefill_batch([task_of(prompt, 0, len(prompt.ids))]):
        pass
