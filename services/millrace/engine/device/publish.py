"""Passes a layer to its transfer after the device has written it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

TOGETHER_S: Final = 10e-3
"""Seconds of layers that go to their transfers together, on a GPU. A short pass computes a layer
in 0.2 ms, and every message to the event loop costs the host more than that: time that the compute
thread waits for the interpreter, while the GPU waits for the compute thread."""


class LayerPublisher:
    """Runs calls in order, each after the device work that was queued before it.

    On the CPU that is at once. On CUDA the compute thread runs ahead of the device: it records an
    event behind one or several calls and continues, and the publisher's own thread waits for the
    event. No stream is synchronised. The compute thread calls the methods.
    """

    def __init__(self, device: torch.device) -> None:
        self._collected: list[Callable[[], None]] = []
        self._since_s = 0.0  # time.monotonic of the first of them
        self._waiting: _Waiting | None = None
        if device.type == "cuda":
            self._waiting = queue.SimpleQueue()
            self._stream_device = device
            self._thread = threading.Thread(target=self._run, name="kv-publish", daemon=True)
            self._thread.start()

    def after_device(self, call: Callable[[], None]) -> None:
        """Runs `call` after all work that the current stream has now."""
        if self._waiting is None:
            call()
            return
        self._collected.append(call)
        self._hand_over(self._waiting)

    def together(self, call: Callable[[], None]) -> None:
        """Runs `call` as `after_device` does; on CUDA with the calls of the next `TOGETHER_S`, or
        before the next call of another method. For calls for which nobody waits yet."""
        if self._waiting is None:
            call()
            return
        now_s = time.monotonic()
        if not self._collected:
            self._since_s = now_s
        self._collected.append(call)
        if now_s - self._since_s >= TOGETHER_S:
            self._hand_over(self._waiting)

    def flush(self) -> None:
        """Waits until the device has done all queued work and all calls have run."""
        done = threading.Event()
        self.after_device(done.set)
        done.wait()

    def close(self) -> None:
        """Ends the thread after all calls have run."""
        if self._waiting is not None:
            self._hand_over(self._waiting)
            self._waiting.put(None)
            self._thread.join()

    def _hand_over(self, waiting: _Waiting) -> None:
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch: untyped
        event.record(torch.cuda.current_stream(self._stream_device))
        waiting.put((event, self._collected))
        self._collected = []

    def _run(self) -> None:
        assert self._waiting is not None
        while (item := self._waiting.get()) is not None:
            event, calls = item
            event.synchronize()
            for call in calls:
                call()


_Waiting = queue.SimpleQueue[tuple[torch.cuda.Event, Sequence[Callable[[], None]]] | None]
