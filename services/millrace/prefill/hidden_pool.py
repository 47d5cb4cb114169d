"""Pools the final hidden states of a prompt into one vector."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch


class HiddenPool:
    """Keeps what a request's vector needs of the hidden states, over all passes of its prompt.

    `kind` is `RequestSpec.pooling`: "last", "mean", or "" for none. A pass is added when it has
    ended, so a suspended pass counts once. Of an SP group, every member keeps the sum over its own
    tokens, and the leader adds them up.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._sum: npt.NDArray[np.float64] | None = None  # [hidden_size]; of "last" one row

    def wants(self, *, has_last: bool) -> bool:
        """Returns whether it needs the rows of a pass. `has_last`: of the prompt's last token,
        too.
        """
        return self._kind == "mean" or (self._kind == "last" and has_last)

    def add(self, hidden: torch.Tensor, *, has_last: bool) -> None:
        """Adds the rows of a pass: [L, hidden_size] after the final norm, the last token's last."""
        if not self.wants(has_last=has_last):
            return
        rows = hidden if self._kind == "mean" else hidden[-1:]
        self._add(rows.sum(0, dtype=torch.float32).double().cpu().numpy())

    def hand_in(self) -> bytes:
        """Returns the sum over this member's tokens, float64; empty if it has none."""
        return b"" if self._sum is None or self._kind != "mean" else self._sum.tobytes()

    def take(self, handed_in: bytes) -> None:
        """Adds what another member handed in."""
        if handed_in:
            self._add(np.frombuffer(handed_in, dtype=np.float64))

    def vector(self, prompt_tokens: int) -> bytes:
        """Returns the vector, float32 [hidden_size], little endian; empty where none is wanted."""
        if self._sum is None:
            return b""
        mean = self._sum / (prompt_tokens if self._kind == "mean" else 1)
        return mean.astype("<f4").tobytes()

    def _add(self, part: npt.NDArray[np.float64]) -> None:
        self._sum = part if self._sum is None else self._sum + part
