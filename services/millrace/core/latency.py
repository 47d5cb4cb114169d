"""Latency of a prefill chunk: Tetris section 5.1, Eq. (1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """seconds = a + b L + c C L + d L^2, L the chunk's tokens, C the history's (Tetris Eq. (1)).

    The defaults are an order of size for an instance that reported nothing: 1 ms a token.
    """

    a: float = 0.0
    b: float = 1e-3
    c: float = 0.0
    d: float = 0.0

    def chunk_s(self, tokens: int, history: int = 0) -> float:
        """Predicted seconds to compute `tokens` on top of `history` tokens."""
        return self.a + tokens * (self.b + self.c * history + self.d * tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class SpLatency:
    """Eq. (1) for every SP degree that the instances can form; degree 1 is always there."""

    by_sp: Mapping[int, Latency] = field(default_factory=lambda: MappingProxyType({1: Latency()}))

    @property
    def degrees(self) -> tuple[int, ...]:
        """SP degrees, ascending."""
        return tuple(self.by_sp)

    def chunk_s(self, tokens: int, history: int = 0, sp: int = 1) -> float:
        """Predicted seconds of a chunk on a group of `sp` instances."""
        return self.by_sp[sp].chunk_s(tokens, history)
