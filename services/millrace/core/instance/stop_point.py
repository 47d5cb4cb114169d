"""Names the points where a prefill may stop (FlowPrefill section 5.1, Figure 6)."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

_LAYER_ENDS: Final = ("down_proj", "experts")


class StopPoint(IntEnum):
    """What ends where a task may stop, the finest first."""

    OPERATOR = 0
    LAYER = 1
    PASS = 2  # a chunk of at most engine.max_chunk_tokens: no activations are held
    END = 3

    @classmethod
    def of(cls, granularity: str) -> StopPoint:
        """Returns the finest stop that `scheduler.preemption` allows."""
        return {"operator": cls.OPERATOR, "layer": cls.LAYER, "chunk": cls.PASS, "none": cls.END}[
            granularity
        ]

    @classmethod
    def after(cls, operator: str) -> StopPoint:
        """Returns what ends with an operator of a forward pass."""
        return cls.LAYER if operator in _LAYER_ENDS else cls.OPERATOR
