"""Measures attention after a long history, up to the end of the model's context.

Only attention grows with the history, and layers of one window cost the same: a pass that is given
up once each kind of layer has attended gives the time of the whole pass.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from millrace.engine.assembly import Engine
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.kv.pool import page_runs
from millrace.engine.model.operators import ATTN_ROWS


def written_pages(engine: Engine, tokens: int, least_bytes: int) -> list[int]:
    """Allocates pages for `tokens` tokens, or for `least_bytes` if that is more, as far as the pool
    has them.

    The caller frees them. On the host, memory that was never written reads as one page of zeros,
    faster than any cache; so the pages are written.
    """
    layout = engine.layout
    wanted = max(
        layout.pages_for(tokens), least_bytes // layout.bytes_per_token // layout.page_tokens
    )
    pages = engine.pool.allocate(min(wanted, engine.pool.free_pages))
    for start, count in page_runs(pages):
        engine.pool.storage[:, start : start + count].zero_()
    return pages


@torch.inference_mode()
def attention_s(engine: Engine, tokens: int, history: int, pages: Sequence[int]) -> float:
    """Returns the seconds that all layers of the model attend for a chunk of `tokens` on `history`.

    pages: used for the whole context, repeatedly where they are too few. They should hold more
    bytes than the caches.
    """
    windows = engine.runner.model.config.sliding_windows
    count = engine.layout.pages_for(tokens + history)
    task = PrefillTask(
        token_ids=torch.zeros(tokens, dtype=torch.int64, device=engine.device),
        history_tokens=history,
        pages=[pages[i % len(pages)] for i in range(count)],
        want_logits=False,
    )
    kinds: dict[int | None, float] = {}
    attended = 0
    steps = engine.runner.prefill_batch([task])
    start_s = settled_s(engine.device)
    try:
        for boundary in steps:
            if boundary.awaited is not None:
                boundary.awaited.wait()
            if boundary.operator == ATTN_ROWS:
                continue
            end_s = settled_s(engine.device)
            if boundary.operator == "attn":
                kinds.setdefault(windows[attended], end_s - start_s)
                attended += 1
                if len(kinds) == len(set(windows)):
                    break
            start_s = end_s
    finally:
        steps.close()
    held_s = sum(kinds[window] for window in windows)
    return held_s * engine.layout.model_layers / len(windows)  # of a stage: the others' too


def settled_s(device: torch.device) -> float:
    """Returns the time, by time.perf_counter, when the device has finished all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
