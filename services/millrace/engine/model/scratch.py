"""Memory for activations, used again by the next operator, layer and pass.

New memory is touched for the first time page by page, which costs a prefill more than its norms.
"""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.engine.kv.host_memory import host_zeros


class Scratch:
    """Tensors on the host that belong to a caller from `take` to `give`.

    A suspended pass keeps what it has taken, and no more. Tensors given back are kept for one
    number of rows, that of the last `take`; so at most one pass's memory lies idle.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._rows = 0
        self._spare: dict[int, list[Tensor]] = {}  # by width

    @property
    def idle(self) -> int:
        """Returns the number of tensors that were given back and lie idle."""
        return sum(map(len, self._spare.values()))

    def take(self, rows: int, width: int) -> Tensor:
        """Returns [rows, width] with undefined content."""
        if rows != self._rows:
            self._rows, self._spare = rows, {}
        spare = self._spare.get(width)
        if spare:
            return spare.pop()
        with torch.inference_mode(False):  # the next caller may be in another mode
            return host_zeros((rows, width), self._dtype)

    def give(self, tensor: Tensor) -> None:
        """Takes a tensor back; no caller may use it any more."""
        rows, width = tensor.shape
        if rows == self._rows:
            self._spare.setdefault(width, []).append(tensor)
