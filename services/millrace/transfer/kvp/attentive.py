"""Waits for a peer's message on the thread that needs it."""

from __future__ import annotations

import os
import time
from queue import Empty, SimpleQueue
from typing import Final, TypeVar

from millrace.transfer.transport.base import Transport

T = TypeVar("T")

ATTENTIVE_S: Final = 2e-3
"""Answers of an exchange come within this, layer for layer; what takes longer is slept over."""


def next_of(queue: SimpleQueue[T], transport: Transport, timeout_s: float | None) -> T | None:
    """What a handler of the transport puts next into the queue; None when it took too long.

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
