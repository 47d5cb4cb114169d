"""Keeps the host at most a few operators ahead of the GPU."""

from __future__ import annotations

from collections import deque
from typing import Final

import torch

RUN_AHEAD_OPERATORS: Final = 4
"""Operators that the host may have enqueued on a GPU beyond the one that executes."""


class RunAhead:
    """Keeps the host within a few operators of the GPU, so that a stop takes effect within them.

    Records an event after each operator, and waits for the event `RUN_AHEAD_OPERATORS` back: the
    device always has work queued, and no stream is synchronised. On the CPU an operator has run
    when it returns.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device if device.type == "cuda" else None
        self._events: deque[torch.cuda.Event] = deque()

    def step(self) -> None:
        """Records an event; called after each operator was enqueued."""
        if self._device is None:
            return
        event = torch.cuda.Event()  # type: ignore[no-untyped-call] # torch: untyped
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)
        if len(self._events) > RUN_AHEAD_OPERATORS:
            self._events.popleft().synchronize()

    def settle(self) -> None:
        """Drops the events of a task that is over."""
        self._events.clear()
