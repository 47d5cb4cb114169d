"""The token sequences that an answer never has."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt


class BadWords:
    """The last tokens of one answer, and the tokens that would complete a barred sequence.

    The prompt does not count, as in vLLM.
    """

    def __init__(self, sequences: Sequence[tuple[int, ...]]) -> None:
        """`sequences` have at least one token each."""
        self._always = [ids[0] for ids in sequences if len(ids) == 1]
        self._after: dict[int, list[tuple[int, ...]]] = {}  # by the last token but one
        for ids in sequences:
            if len(ids) > 1:
                self._after.setdefault(ids[-2], []).append(ids)
        longest = max(map(len, sequences), default=1)
        self._tail: deque[int] = deque(maxlen=longest - 1)

    def append(self, token_id: int) -> None:
        """Adds a token of the answer."""
        self._tail.append(token_id)

    def barred(self) -> npt.NDArray[np.int64]:
        """Returns the tokens that may not come next, int64 [k]."""
        found = list(self._always)
        if self._tail:
            tail = tuple(self._tail)
            for ids in self._after.get(tail[-1], ()):
                if tail[1 - len(ids) :] == ids[:-1]:
                    found.append(ids[-1])
        return np.array(found, dtype=np.int64)
