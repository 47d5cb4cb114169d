"""Waits for a peer's message on the thread that needs it."""

from __future__ import annotations

import os
import time
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

from millrace.transfer.transport.base import Transport

T = TypeVar("T")

ATTENTIVE_S: Final = 2e-3
"""Time in seconds to poll without sleeping: an exchange's answer per layer comes within it."""


def next_of(queue: SimpleQueue[T], transport: Transport, timeout_s: float | None) -> T | None:
    """Returns the next item that a transport's handler puts into `queue`; None after `timeout_s`.

    At first the calling thread makes the transport's progress itself, where it can.
    """
    until_s = time.monotonic() + ATTENTIVE_S
    while True:
        try:
            return queue.get_nowait()
        except Empty:
            pass
        if not transport.progress() or time.monotonic() > until_s:
            break
        os.sched_yield()  # gives the interpreter to other threads, the core to other processes
    try:
        return queue.get(timeout=timeout_s)
    except Empty:
        return None
