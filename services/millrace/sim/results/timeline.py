"""Notes what every instance did and when, for a Gantt chart."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Kind = Literal["prefill", "decode", "idle wait", "blocked"]


@dataclass(frozen=True, slots=True)
class Block:
    """One span of one instance's time, in simulated seconds."""

    instance_id: str
    start_s: float
    end_s: float
    request_index: int  # -1 where it is no single request's
    kind: Kind


class Timeline:
    """Keeps the blocks that overlap a window of time, `most` at most; later ones are left out."""

    def __init__(
        self, *, start_s: float = 0.0, end_s: float = math.inf, most: int = 20_000
    ) -> None:
        self.blocks: list[Block] = []
        self.left_out = 0
        self._start_s = start_s
        self._end_s = end_s
        self._most = most

    def block(
        self, instance_id: str, start_s: float, end_s: float, request_index: int, kind: Kind
    ) -> None:
        """Notes one span; the part outside the window is cut off."""
        start_s, end_s = max(start_s, self._start_s), min(end_s, self._end_s)
        if start_s >= end_s:
            return
        if len(self.blocks) >= self._most:
            self.left_out += 1
            return
        self.blocks.append(Block(instance_id, start_s, end_s, request_index, kind))
