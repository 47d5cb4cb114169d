"""The tokens that a sequence has seen, updated token by token for the penalties."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor


class TokenCounts:
    """The distinct ids of prompt and output, and how often each is in the output.

    Holds as many entries as there are distinct ids, never more than the vocabulary. Adding a token
    is O(1).
    """

    def __init__(
        self,
        prompt_ids: npt.NDArray[np.integer] | Sequence[int] | Tensor = (),
        output_tokens: int = 0,
    ) -> None:
        """`prompt_ids` (int [L]) count as seen, with an output count of zero, except their last
        `output_tokens`, which count as output."""
        if isinstance(prompt_ids, Tensor):
            prompt_ids = prompt_ids.numpy(force=True)
        ids = np.asarray(prompt_ids, dtype=np.int64)
        seen = len(ids) - output_tokens
        distinct = np.unique(ids[:seen])
        self._size = len(distinct)
        self._slot_of = {token_id: slot for slot, token_id in enumerate(distinct.tolist())}
        self._ids = np.concatenate((distinct, np.zeros(64, dtype=np.int64)))
        self._output = np.zeros(len(self._ids), dtype=np.float32)
        for token_id in ids[seen:].tolist():
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Counts one more `token_id` in the output."""
        slot = self._slot_of.setdefault(token_id, self._size)
        if slot == self._size:
            self._append(token_id)
        self._output[slot] += 1.0

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Returns the distinct ids of prompt and output, int64 [k]."""
        return self._ids[: self._size]

    @property
    def output(self) -> npt.NDArray[np.float32]:
        """Returns how often each of `ids` is in the output, float32 [k] (exact up to 2**24)."""
        return self._output[: self._size]

    def _append(self, token_id: int) -> None:
        if self._size == len(self._ids):
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._output = np.concatenate((self._output, np.zeros_like(self._output)))
        self._ids[self._size] = token_id
        self._size += 1
