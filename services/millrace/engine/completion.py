"""What a computation yields where it can't go on before something has come."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Completion:
    """Yielded in place of a boundary: others may run until it is ready. Who goes on with the
    computation before that waits."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ready = threading.Event()
        self._then: Callable[[], None] | None = None

    def set(self) -> None:
        """It is ready, for good."""
        with self._lock:
            self._ready.set()
            call, self._then = self._then, None
        if call is not None:
            call()

    def wait(self, timeout_s: float | None = None) -> bool:
        """Returns whether it is ready, at the latest after `timeout_s`."""
        return self._ready.wait(timeout_s)

    def then(self, call: Callable[[], None]) -> bool:
        """Has `call` made once it is ready, on the thread that says so. False: it is already."""
        with self._lock:
            if self._ready.is_set():
                return False
            self._then = call
            return True
