"""An event loop that stands still now and then and hears of its sockets late, as on a busy machine.

`pytest --late` (`make test-late`) gives every test such a loop. What a test takes for granted
because it is nearly always so (a message comes before a computation ends, a timer fires after what
was ready before it) fails here within a few runs.
"""

from __future__ import annotations

import asyncio
import random
import time
from selectors import SelectorKey

LATE, MEAN_DELAY_S = 0.2, 0.008  # share of a socket's events that come late, and by how much
STALLS, MEAN_STALL_S, MOST_STALL_S = 0.03, 0.03, 0.15  # share of the loop's rounds
PAUSE_S = 0.0003  # of a loop whose events are all late, so that it does not spin

DRAW = random.Random()  # of all loops; tests have `random` to themselves


class LateLoop(asyncio.SelectorEventLoop):
    """Delays events and itself at random."""

    def __init__(self) -> None:
        super().__init__()
        self._late: dict[int, float] = {}  # file descriptor -> when its event may come

    def _run_once(self) -> None:
        if DRAW.random() < STALLS:
            time.sleep(min(MOST_STALL_S, DRAW.expovariate(1 / MEAN_STALL_S)))
        super()._run_once()  # type: ignore[misc]

    def _process_events(self, events: list[tuple[SelectorKey, int]]) -> None:
        now_s = time.monotonic()
        due = [event for event in events if self._is_due(event[0].fd, now_s)]
        if events and not due:
            time.sleep(PAUSE_S)
        super()._process_events(due)  # type: ignore[misc]

    def _is_due(self, fd: int, now_s: float) -> bool:
        """Whether an event comes now. One that doesn't is selected again in the next round."""
        if fd not in self._late:
            delayed = DRAW.random() < LATE
            self._late[fd] = now_s + (DRAW.expovariate(1 / MEAN_DELAY_S) if delayed else 0.0)
        if self._late[fd] > now_s:
            return False
        del self._late[fd]
        return True


class LateLoops(asyncio.DefaultEventLoopPolicy):
    _loop_factory = LateLoop
