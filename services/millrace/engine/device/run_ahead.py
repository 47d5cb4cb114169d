"""Keeps the host at most a few operators, and a short time, ahead of the GPU."""

from __future__ import annotations

from collections import deque
from typing import Final

import torch

RUN_AHEAD_OPERATORS: Final = 4
"""Operators at most that the host may have enqueued on a GPU and that have not ended."""

RUN_AHEAD_MS: Final = 1.5
"""Milliseconds at most that they take together, unless one alone takes longer. Enqueuing the next
takes the host some 0.1 ms."""

_LATEST: Final = 8
"""Operators whose longest stands for the next ones: a layer has five or six."""


class RunAhead:
    """Keeps the host close to the GPU, so that a stop takes effect soon.

    Records an event after each operator, and waits for an earlier one where too much is enqueued:
    the device always has work queued, and no stream is synchronised. How long operators take shows
    in the events that have passed. On the CPU an operator has run when it returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._events: deque[torch.cuda.Event] = deque()
        self._passed: torch.cuda.Event | None = None
        self._latest_ms: deque[float] = deque(maxlen=_LATEST)

    @property
    def most(self) -> int:
        """The operators that may be enqueued and not ended."""
        longest_ms = max(self._latest_ms, default=0.0)
        if longest_ms * RUN_AHEAD_OPERATORS <= RUN_AHEAD_MS:
            return RUN_AHEAD_OPERATORS
        return max(int(RUN_AHEAD_MS / longest_ms), 1)

    def step(self) -> None:
        """Records an event; called after each operator was enqueued."""
        if self._device is None:
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call] # torch: untyped
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)
        while len(self._events) > self.most:
            self._pass()

    def settle(self) -> None:
        """Drops the events of a task that is over."""
        self._events.clear()
        self._passed = None

    def _pass(self) -> None:
        """Waits for the earliest event."""
        event = self._events.popleft()
        event.synchronize()
        if self._passed is not None:
            self._latest_ms.append(self._passed.elapsed_time(event))
        self._passed = event
