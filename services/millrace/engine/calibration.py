"""A few timed steps at start-up, where no profile has been measured."""

from __future__ import annotations

import time
from typing import Final

import torch
from torch import Tensor

from millrace.engine.assembly import Engine

BUDGET_S: Final = 0.2
_LONGEST_TOKENS: Final = 4096  # of a sequence whose steps are timed


def calibrate_decode(engine: Engine, max_batch: int) -> list[tuple[int, int, float]]:
    """(sequences, their context tokens in total, seconds) of decode steps, 3 to 9 of them.

    Batches of one, of some and of `max_batch`, each short, longer and longest first, within about
    `BUDGET_S` seconds: one batch at a time is finished. The KV is of no tokens, for time does not
    depend on it; sequences share their pages, so that caches may make long ones look a little fast.
    """
    page_tokens = engine.layout.page_tokens
    room = min(engine.max_context_tokens, engine.pool.free_pages * page_tokens, _LONGEST_TOKENS)
    lengths = sorted({max(1, min(room, length)) for length in (64, 512, _LONGEST_TOKENS)})
    pages = engine.pool.allocate(engine.layout.pages_for(lengths[-1]))
    steps: list[tuple[int, int, float]] = []
    begun = time.perf_counter()
    try:
        for size in sorted({1, max(1, max_batch // 4), max_batch}):
            for length in lengths:
                step_s = _step_s(engine, size, length, pages)
                steps.append((size, size * length, step_s))
            if time.perf_counter() - begun > BUDGET_S:
                break
    finally:
        engine.pool.free(pages)
    return steps


def _step_s(engine: Engine, size: int, length: int, pages: list[int]) -> float:
    table = torch.tensor(pages, dtype=torch.int32).repeat(size, 1)
    inputs = (
        torch.zeros(size, dtype=torch.int64),
        torch.full((size,), length - 1),
        table,
        torch.full((size,), length, dtype=torch.int32),
    )
    _timed(engine, inputs)  # the first one makes what later ones use again
    return _timed(engine, inputs)


def _timed(engine: Engine, inputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> float:
    with torch.inference_mode():
        start = time.perf_counter()
        engine.runner.decode(*inputs).argmax(-1).cpu()
        return time.perf_counter() - start
