"""Rows between stages, as a stage sees them.

`millrace.transfer.activations` moves the rows over the transport; the engine knows no transport.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Handed:
    """Rows that have come. The reader calls `take` after its last use of `x`."""

    number: int  # the pass's
    x: Tensor  # [n, H]
    take: Callable[[], None]


class RowsOut(Protocol):
    """Sends rows to the next stage. One thread uses it."""

    def send(self, number: int, summands: tuple[Tensor, Tensor]) -> None:
        """Hands on the sum of two [n, H], n at least 1. Waits while the next stage has no room.

        Raises TransferError when the next stage is gone, or takes nothing for too long.
        """
