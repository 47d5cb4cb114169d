"""Logs which prefill instances lag behind their pool, and which have caught up."""

from __future__ import annotations

import logging

from millrace.core.scheduler.machine import Machine

log = logging.getLogger(__name__)


class SlowLog:
    """Logs what has changed since the last call of `log_changes`."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._logged: set[str] = set()

    def log_changes(self) -> None:
        found = self._machine.slow_instances.names()
        for name in sorted(found - self._logged):
            log.warning("%s is slow: its chunks take far longer than at others of its pool", name)
        for name in sorted(self._logged - found):
            log.info("%s is slow no more, or has left", name)
        self._logged = found
