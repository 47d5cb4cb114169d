"""The agreed stop of the ranks of a group (FlowPrefill section 5.1, under tensor parallelism).

A rank that stopped where it saw the signal would leave the other ranks in a collective that it
never joins. So all ranks share counters, and a rank enters its operator there before it begins. A
stop is set for the first operator that no rank has begun, and every rank runs up to that operator.

Deviation: the paper proposes the proposer's own counter plus one, which a faster rank may have
passed. Here the stop is the largest counter plus one, under one lock, which no rank has passed. So
no rank waits for another to agree, and without a stop an entry costs a microsecond.
"""

from __future__ import annotations

from multiprocessing.context import BaseContext

_NEVER = (1 << 63) - 1
_STOP_AT = 0  # the cells: where to stop, then the last operator that each rank has begun
_LOCK_TIMEOUT_S = 10.0


class StopCounter:
    """Counters that processes or threads share; a child process takes the object as an argument."""

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
        """Sets the operator before which every rank stops: the first that no rank has begun.

        Returns the operator. A stop that is set does not move.
        """
        self._hold()
        try:
            if self._cells[_STOP_AT] == _NEVER:
                self._cells[_STOP_AT] = max(self._cells[1:]) + 1
            return int(self._cells[_STOP_AT])
        finally:
            self._lock.release()

    def begin(self, operator: int) -> None:
        """Clears the stop; all ranks continue from `operator`. Call it while all ranks rest."""
        self._hold()
        try:
            self._cells[:] = [_NEVER] + [operator - 1] * (len(self._cells) - 1)
        finally:
            self._lock.release()

    def begun(self, rank: int) -> int:
        """Returns the last operator that the rank has begun."""
        return int(self._cells[1 + rank])

    def _hold(self) -> None:
        if not self._lock.acquire(timeout=_LOCK_TIMEOUT_S):
            raise TimeoutError("a rank died while it held the lock of the stop counter")
