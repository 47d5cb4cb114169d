"""Numbers the attempts at requests, so that no two schedulers use one number for one request.

An instance tells the attempts at a request apart by their numbers alone. A scheduler that leads
after the store has lost its data knows of no attempt, while instances may still compute some.
"""

from __future__ import annotations


def attempts_before(epoch: int) -> int:
    """Returns the largest number that an attempt of a scheduler before `epoch` may have.

    Epochs are milliseconds since 1970 or later, no two of one second (`state.leases`). A
    scheduler's first attempts are numbered from 1, those at requests that it took over from the
    seconds of its epoch: an earlier scheduler would have to begin one request more than once a
    second to come so far.
    """
    return epoch // 1000


def is_later(epoch: int, than: int) -> bool:
    """Returns whether the scheduler of `epoch` numbers its attempts after those of `than`."""
    return attempts_before(epoch) > attempts_before(than)
