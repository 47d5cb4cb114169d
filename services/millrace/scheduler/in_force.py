"""Logs which mechanisms of the papers are in force, and why the others are off."""

from __future__ import annotations

import logging

from millrace.core.scheduler.explanation.mechanisms import Mechanism, mechanisms
from millrace.core.scheduler.machine import Machine

log = logging.getLogger(__name__)


class InForce:
    """Logs the mechanisms that have changed since the last call of `log_changes`."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._logged: list[Mechanism] = []

    def log_changes(self) -> None:
        """Logs the changes. Call it after instances joined or left."""
        found = mechanisms(self._machine)
        for one in found:
            if one not in self._logged:
                log.info("%s", one)
        self._logged = found
