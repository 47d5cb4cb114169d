"""The log says what the papers' mechanisms are set to, and why one is off."""

from __future__ import annotations

import logging

from millrace.core.scheduler.machine import Machine
from millrace.core.scheduler.mechanisms import Mechanism, mechanisms

log = logging.getLogger(__name__)


class InForce:
    """Logs what has changed since it was last asked to."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._told: list[Mechanism] = []

    def tell(self) -> None:
        """Call it when instances came or went."""
        found = mechanisms(self._machine)
        for one in found:
            if one not in self._told:
                log.info("%s", one)
        self._told = found
