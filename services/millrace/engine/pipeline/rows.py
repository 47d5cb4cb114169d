"""How rows go from stage to stage: what a stage is given.

`millrace.transfer.activations` has them, over the transport; the engine knows no transport.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Handed:
    """Rows that have come. `take` ends the use of `x`, which was read or copied by then."""

    number: int  # the pass's
    x: Tensor  # [n, H]
    take: Callable[[], None]


class RowsOut(Protocol):
    """The way to the next stage. For one thread."""

    def send(self, number: int, summands: tuple[Tensor, Tensor]) -> None:
        """Hands on the sum of two [n, H], n at least 1. Waits while the next stage is behind.

        Raises TransferError when it is gone, or takes nothing for too long.
        """
