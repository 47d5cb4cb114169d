"""Times a few steps at start-up, where no profile has been measured."""

from __future__ import annotations

import itertools
import time
from typing import Final

import torch
from torch import Tensor

from millrace.core.cost.latency import Latency
from millrace.engine.assembly import Engine
from millrace.engine.attention_cost import attention_s, settled_s, written_pages
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.kv.page_table import PageTable
from millrace.profiles import eq_1

BUDGET_S: Final = 0.2
PREFILL_BUDGET_S: Final = 0.5
FAR_BUDGET_S: Final = 0.1  # attention at the context's end, the longest chunk of it
WRITTEN_BYTES: Final = 64 << 20  # of the pages used as a history
_LONGEST_TOKENS: Final = 4096  # of a sequence whose steps are timed
_LEAST_STEPS: Final = 3  # of which every term of a decode step's time can be fitted


@torch.inference_mode()
def calibrate(engine: Engine, max_chunk_tokens: int) -> Latency:
    """Fits Tetris Eq. (1) to a few prefills, within about `PREFILL_BUDGET_S` seconds.

    Lengths double until the budget is spent. Only attention grows with the square: where the
    context extends beyond those lengths, attention is timed by itself at the context's end, and d =
    c / 2 by FLOP counting (PAPERS: CDSP). A prompt above `max_chunk_tokens` takes several passes,
    each run to its end before the next.
    """
    free_tokens = engine.pool.free_pages * engine.layout.page_tokens
    limit = min(1024, engine.max_context_tokens, free_tokens)
    pages = written_pages(engine, limit, WRITTEN_BYTES)
    points: list[tuple[int, float]] = []
    try:
        length, spent_s = min(16, limit), 0.0
        _prefill_s(engine, length, pages, max_chunk_tokens)  # pays one-time costs
        while length <= limit and spent_s < PREFILL_BUDGET_S:
            points.append((length, _prefill_s(engine, length, pages, max_chunk_tokens)))
            spent_s += points[-1][1]
            length *= 2
        pair_s = None
        if engine.max_context_tokens > points[-1][0]:
            pair_s = _pair_s(engine, min(max_chunk_tokens, points[-1][0]), pages)
    finally:
        engine.pool.free(pages)
    return eq_1.latency(*eq_1.fit(points, d=None if pair_s is None else pair_s / 2))


@torch.inference_mode()
def warm_up_prefill(engine: Engine) -> None:
    """Runs a short prefill, so that no request pays the one-time costs of the first pass."""
    tokens = min(16, engine.layout.page_tokens, engine.max_context_tokens)
    pages = engine.pool.allocate(1)
    try:
        _prefill_s(engine, tokens, pages, tokens)
    finally:
        engine.pool.free(pages)


def warm_up_decode(engine: Engine, table: PageTable | None = None) -> None:
    """Runs a decode step of one sequence, so that no request pays the costs of the first step.
    `table`: as of `calibrate_decode`."""
    pages = engine.pool.allocate(1)
    try:
        _step_s(engine, 1, 1, pages, table)
    finally:
        engine.pool.free(pages)


def _pair_s(engine: Engine, most: int, pages: list[int]) -> float:
    """Returns the seconds per (query, key) pair at the context's end, in a chunk of at most `most`
    tokens.
    """
    context, tokens = engine.max_context_tokens, min(16, most)
    while True:
        history = context - tokens
        start_s = time.perf_counter()
        seconds = min(attention_s(engine, tokens, history, pages) for _ in range(2))
        if 2 * tokens > most or time.perf_counter() - start_s > FAR_BUDGET_S / 2:
            return seconds / (tokens * (history + tokens / 2))
        tokens *= 2


def _prefill_s(engine: Engine, tokens: int, pages: list[int], max_chunk_tokens: int) -> float:
    start = time.perf_counter()
    for history in range(0, tokens, max_chunk_tokens):
        chunk = min(max_chunk_tokens, tokens - history)
        task = PrefillTask(
            token_ids=torch.zeros(chunk, dtype=torch.int64, device=engine.device),
            history_tokens=history,
            pages=pages,
            want_logits=True,
            want_hidden=False,
        )
        for _ in engine.runner.prefill_batch([task]):
            pass
    return settled_s(engine.device) - start


def calibrate_decode(
    engine: Engine, max_batch: int, table: PageTable | None = None
) -> list[tuple[int, int, float]]:
    """Returns (sequences, their context tokens in total, seconds) of up to 9 decode steps.

    One sequence and `max_batch`, each with a short and a long context, so that every term of the
    fit shows; then others, within about `BUDGET_S` seconds. The KV has no real tokens, since time
    does not depend on them; sequences share their pages, so caches may make long contexts look a
    little fast. `table`: the one that the runner follows, if its steps run by CUDA graphs.
    """
    page_tokens = engine.layout.page_tokens
    room = min(engine.max_context_tokens, engine.pool.free_pages * page_tokens, _LONGEST_TOKENS)
    short, middle, long = (max(1, min(room, length)) for length in (64, 512, _LONGEST_TOKENS))
    wanted = dict.fromkeys(
        [
            *((1, short), (1, long), (max_batch, short), (max_batch, long)),
            *itertools.product((1, max_batch // 4 or 1, max_batch), (short, middle, long)),
        ]
    )
    pages = engine.pool.allocate(engine.layout.pages_for(long))
    steps: list[tuple[int, int, float]] = []
    begun = time.perf_counter()
    try:
        for size, length in wanted:
            if len(steps) >= _LEAST_STEPS and time.perf_counter() - begun > BUDGET_S:
                break
            steps.append((size, size * length, _step_s(engine, size, length, pages, table)))
    finally:
        engine.pool.free(pages)
    return steps


def _step_s(
    engine: Engine, size: int, length: int, pages: list[int], table: PageTable | None = None
) -> float:
    if table is None:
        rows = torch.tensor(pages, dtype=torch.int32).repeat(size, 1)
    else:
        for row in range(size):
            table.put(row, pages)
        rows = table.first(size)
    inputs = (
        torch.zeros(size, dtype=torch.int64),
        torch.full((size,), length - 1),
        rows,
        torch.full((size,), length, dtype=torch.int32),
    )
    _timed(engine, inputs)  # the first step allocates memory that later steps use again
    return _timed(engine, inputs)


def _timed(engine: Engine, inputs: tuple[Tensor, Tensor, Tensor, Tensor]) -> float:
    with torch.inference_mode():
        start = time.perf_counter()
        engine.runner.decode(*inputs).argmax(-1).cpu()
        return time.perf_counter() - start
