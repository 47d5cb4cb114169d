"""Least-queue placement: one chunk on the instance with the least predicted work ahead.

The work ahead is Tetris's queuing time of an instance (section 5.1): the predicted seconds of all
that it holds, of its running task only what remains. SP degree 1: one instance, one chunk, which
the engine cuts into forward passes itself.
"""

from __future__ import annotations

from collections.abc import Sequence

from millrace.core.cluster import PrefillInstance
from millrace.core.request import Chunk, Request


def plan(request: Request, instances: Sequence[PrefillInstance], now_s: float) -> tuple[Chunk, ...]:
    """The whole prompt as one chunk. `instances` is not empty; the least id wins among equals."""
    best = min(instances, key=lambda instance: (instance.outstanding_s(now_s), instance.id))
    return (
        Chunk(index=0, start_token=0, num_tokens=request.prompt_tokens, instance_ids=(best.id,)),
    )
