"""A clock that a test takes ahead, so that leases and deadlines pass when the test says so."""

from __future__ import annotations

import sys
import time
from typing import Any

import pytest


class Clock:
    """In the place of the module `time`: it goes as ever, and `skip` takes it ahead at once.

    Timeouts of asyncio, of futures and of locks keep the real time.
    """

    def __init__(self) -> None:
        self._ahead_s = 0.0

    def skip(self, seconds: float) -> None:
        self._ahead_s += seconds

    def monotonic(self) -> float:
        return time.monotonic() + self._ahead_s

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


def given_to(package: str, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """A clock that the package's modules read from now on."""
    clock = Clock()
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{package}.") and getattr(module, "time", None) is time:
            monkeypatch.setattr(module, "time", clock)
    return clock
