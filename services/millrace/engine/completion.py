"""A completion, which a computation yields where it can't continue before an event."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Completion:
    """An event that is set once. A generator yields a completion in place of a boundary: other
    tasks may run until the completion is set; a caller that resumes the generator before then
    waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._then: Callable[[], None] | None = None

    def set(self) -> None:
        """Sets the completion, for good, and makes the call of `then`."""
        with self._lock:
            self._ready.set()
            call, self._then = self._then, None
        if call is not None:
            call()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Waits until the completion is set, at most `timeout_s`. Returns whether it is set."""
        return self._ready.wait(timeout_s)

    def then(self, call: Callable[[], None]) -> bool:
        """Has `call` made once the completion is set, on the thread that sets it. Returns
        False, and makes no call, where the completion is set already."""
        with self._lock:
            if self._ready.is_set():
                return False
            self._then = call
            return True
