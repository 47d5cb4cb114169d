"""Passes a layer to its transfer after the device has written it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch


class LayerPublisher:
    """Runs calls in order, each after the device work that was queued before it.

    On the CPU that is at once. On CUDA the compute thread runs ahead of the device: it records an
    event and continues, and the publisher's own thread waits for the event. No stream is
    synchronised.
    """

    def __init__(self, device: torch.device) -> None:
        self._waiting: queue.SimpleQueue[tuple[torch.cuda.Event, Callable[[], None]] | None] | None
        self._waiting = None
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
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call] # torch: untyped
        event.record(torch.cuda.current_stream(self._stream_device))
        self._waiting.put((event, call))

    def flush(self) -> None:
        """Waits until the device has done all queued work and all calls have run."""
        done = threading.Event()
        self.after_device(done.set)
        done.wait()

    def close(self) -> None:
        """Ends the thread after all calls have run."""
        if self._waiting is not None:
            self._waiting.put(None)
            self._thread.join()

    def _run(self) -> None:
        assert self._waiting is not None
        while (item := self._waiting.get()) is not None:
            event, call = item
            event.synchronize()
            call()
