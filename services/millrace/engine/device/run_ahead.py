"""Keeps the host a short time ahead of the GPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

import torch

RUN_AHEAD_MS: Final = 1.5
"""Milliseconds of work that the host keeps enqueued on a GPU. It enqueues the next operator when so
much or less is left. Enqueuing takes the host some 0.1 ms, or as long as it waits for the
interpreter. A GPU that processes share goes to another one for milliseconds whenever its queue is
empty: a shorter queue would leave it more often."""

RUN_AHEAD_OPERATORS: Final = 32
"""Operators at most, however short they are."""

_UNKNOWN_MS: Final = RUN_AHEAD_MS / 4
"""Of an operator of which no pass has shown the time."""

_LATEST: Final = 3
"""Layers whose shortest time stands for an operator. The others may have an operator's wait for the
host, or for another process that uses the GPU."""

_LOOK_S: Final = 1e-4
"""Between two looks at the GPU and at the caller's wish to stop."""


class Pace:
    """The times of a pass's operators, as far as they are known. A pass that stops keeps them.

    `rows`: of the pass. Before an operator's time is known, that of earlier passes stands for it,
    row for row. ``operator``: the name of the last one, set before it is reported.
    """

    def __init__(self, rows: int = 1) -> None:
        self.rows = max(1, rows)
        self.operator = ""
        self.latest_ms: dict[str, deque[float]] = {}  # by operator


class _Enqueued(NamedTuple):
    """An operator, by the event after it."""

    event: torch.cuda.Event
    pace: Pace
    operator: str
    expected_ms: float


class RunAhead:
    """Keeps the host close to the GPU, so that a stop takes effect soon.

    Records an event after each operator, and waits where too much is enqueued: the device always
    has work queued, and no stream is synchronised. How long operators take shows in the events that
    have passed: an operator takes the time that it took in the layers before. On the CPU an
    operator has run when it returns.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        now_s: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._device = device if device.type == "cuda" else None
        self._stream: torch.cuda.Stream | None = None
        self._now_s = now_s
        self._sleep = sleep
        self._row_ms: dict[str, float] = {}  # of earlier passes, by operator
        self._enqueued: deque[_Enqueued] = deque()
        self._enqueued_ms = 0.0  # of them together
        self._passed: torch.cuda.Event | None = None
        self._begun_s = 0.0  # when the first of them began, as far as the host knows

    def step(self, pace: Pace, is_asked: Callable[[], bool] = lambda: False) -> None:
        """Records an event, and waits; called after each operator of a pass was enqueued.

        It returns early when `is_asked`: whether the caller has been asked to stop.
        """
        if self._device is None:
            return
        if self._stream is None:  # the caller's thread keeps it; asking for it is not cheap
            self._stream = torch.cuda.current_stream(self._device)
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch: untyped
        event.record(self._stream)
        self._pass_ended()
        if not self._enqueued:
            self._begun_s = self._now_s()
        expected_ms = self._expected_ms(pace)
        self._enqueued.append(_Enqueued(event, pace, pace.operator, expected_ms))
        self._enqueued_ms += expected_ms
        while not is_asked():
            if len(self._enqueued) > RUN_AHEAD_OPERATORS:
                self._enqueued[0].event.synchronize()
            elif (excess_s := self._excess_s()) > 0:
                self._sleep(min(excess_s, _LOOK_S))
            else:
                break
            self._pass_ended()

    def settle(self) -> None:
        """Drops the events of a task that is over."""
        self._enqueued.clear()
        self._enqueued_ms = 0.0
        self._passed = None

    def _expected_ms(self, pace: Pace) -> float:
        if latest_ms := pace.latest_ms.get(pace.operator):
            return min(latest_ms)
        row_ms = self._row_ms.get(pace.operator)
        return _UNKNOWN_MS if row_ms is None else row_ms * pace.rows

    def _excess_s(self) -> float:
        """Returns how long the host should still wait, as far as it knows."""
        if not self._enqueued:
            return 0.0
        done_ms = min(1e3 * (self._now_s() - self._begun_s), self._enqueued[0].expected_ms)
        return (self._enqueued_ms - done_ms - RUN_AHEAD_MS) / 1e3

    def _pass_ended(self) -> None:
        """Takes the events that have passed, and the times of their operators."""
        while self._enqueued and self._enqueued[0].event.query():  # type: ignore[no-untyped-call] # torch: untyped
            first = self._enqueued.popleft()
            self._enqueued_ms -= first.expected_ms
            self._begun_s = self._now_s()
            if self._passed is not None:
                pace = first.pace
                latest_ms = pace.latest_ms.setdefault(first.operator, deque(maxlen=_LATEST))
                latest_ms.append(self._passed.elapsed_time(first.event))
                self._row_ms[first.operator] = min(latest_ms) / pace.rows
            self._passed = first.event
