"""Keeps the host a short time ahead of the GPU."""

from __future__ import annotations

from collections import deque
from typing import Final, NamedTuple

import torch

from millrace.core.instance.stop_point import StopPoint

RUN_AHEAD_MS: Final = 1.5
"""Milliseconds of operators that the host may have enqueued on a GPU and that have not ended,
unless one alone takes longer. Enqueuing the next takes the host some 0.1 ms, or as long as it waits
for the interpreter. A GPU that processes share goes to another one for milliseconds whenever its
queue is empty: a shorter queue would leave it more often."""

RUN_AHEAD_OPERATORS: Final = 32
"""Operators at most, however short they are."""

_UNKNOWN_MS: Final = RUN_AHEAD_MS / 4
"""Of an operator whose time is not known yet."""

_LATEST: Final = 3
"""Layers whose shortest time stands for an operator. The others may have an operator's wait for the
host, or for another process that uses the GPU."""


class _Enqueued(NamedTuple):
    """An operator, by the event after it. `latest_ms`: of the operators in its place, to which its
    own time is added."""

    event: torch.cuda.Event
    latest_ms: deque[float]
    expected_ms: float


class RunAhead:
    """Keeps the host close to the GPU, so that a stop takes effect soon.

    Records an event after each operator, and waits for an earlier one where too much is enqueued:
    the device always has work queued, and no stream is synchronised. How long operators take shows
    in the events that have passed: an operator takes the time that the operator in its place took
    in the layers before. On the CPU an operator has run when it returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._enqueued: deque[_Enqueued] = deque()
        self._enqueued_ms = 0.0  # of them together
        self._passed: torch.cuda.Event | None = None
        self._place = 0  # of the next operator
        self._latest_ms: dict[int, deque[float]] = {}  # by place

    def begin(self) -> None:
        """Forgets how long operators take: a task begins, or goes on after another."""
        self._latest_ms = {}  # operators that are enqueued add their times to the former
        self._place = 0

    def step(self, ended: StopPoint) -> None:
        """Records an event; called after each operator was enqueued. `ended`: what ends with it."""
        if self._device is None:
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch: untyped
        event.record(torch.cuda.current_stream(self._device))
        latest_ms = self._latest_ms.setdefault(self._place, deque(maxlen=_LATEST))
        expected_ms = min(latest_ms, default=_UNKNOWN_MS)
        self._enqueued.append(_Enqueued(event, latest_ms, expected_ms))
        self._enqueued_ms += expected_ms
        self._place = self._place + 1 if ended is StopPoint.OPERATOR else 0
        while len(self._enqueued) > 1 and self._is_too_far:
            self._pass()

    def settle(self) -> None:
        """Drops the events of a task that is over."""
        self._enqueued.clear()
        self._enqueued_ms = 0.0
        self._passed = None

    @property
    def _is_too_far(self) -> bool:
        return self._enqueued_ms > RUN_AHEAD_MS or len(self._enqueued) > RUN_AHEAD_OPERATORS

    def _pass(self) -> None:
        """Waits for the earliest event."""
        first = self._enqueued.popleft()
        self._enqueued_ms -= first.expected_ms
        first.event.synchronize()
        if self._passed is not None:
            first.latest_ms.append(self._passed.elapsed_time(first.event))
        self._passed = first.event
