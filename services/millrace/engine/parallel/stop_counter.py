"""Where the ranks of a group stop together (FlowPrefill section 5.1, under tensor parallelism).

A rank that stopped where it saw the signal would leave the others in a collective that it never
joins. So before every operator a rank looks at a counter that they share: whoever wants a stop
agrees it for the first operator that no rank has begun, and every rank runs up to it.

Deviation: the paper's proposal is the proposer's own counter plus one, over which a rank further on
has run already; the largest counter plus one, under one lock, is what no rank can have passed. So
no rank waits for another to agree, and while nobody stops a look costs a microsecond.
"""

from __future__ import annotations

from multiprocessing.context import BaseContext

_NEVER = (1 << 63) - 1
_STOP_AT = 0  # the cells: where to stop, then the last operator that each rank has begun
_LOCK_TIMEOUT_S = 10.0


class StopCounter:
    """Shared by processes: hand it to a child as an argument, or to threads."""

    def __init__(self, context: BaseContext, ranks: int) -> None:
        self._lock = context.Lock()
        self._cells = context.RawArray("q", [_NEVER] + [-1] * ranks)

    def enter(self, rank: int, operator: int) -> bool:
        """Whether the rank may begin its pass's operator of this number; else it stops there."""
        self._hold()
        try:
            if operator >= self._cells[_STOP_AT]:
                return False
            self._cells[1 + rank] = operator
            return True
        finally:
            self._lock.release()

    def request_stop(self) -> int:
        """Agrees the operator before which every rank stops, the first that none has begun.

        Once agreed it stays, whoever asks again.
        """
        self._hold()
        try:
            if self._cells[_STOP_AT] == _NEVER:
                self._cells[_STOP_AT] = max(self._cells[1:]) + 1
            return int(self._cells[_STOP_AT])
        finally:
            self._lock.release()

    def begin(self, operator: int) -> None:
        """Nobody is to stop any more; all ranks go on from `operator`. Call it while all rest."""
        self._hold()
        try:
            self._cells[:] = [_NEVER] + [operator - 1] * (len(self._cells) - 1)
        finally:
            self._lock.release()

    def begun(self, rank: int) -> int:
        """The last operator that the rank has begun."""
        return int(self._cells[1 + rank])

    def _hold(self) -> None:
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT_S):
            raise TimeoutError("a rank died while it held the lock of the stop counter")
