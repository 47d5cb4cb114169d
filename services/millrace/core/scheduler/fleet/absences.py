"""Remembers instances that were lost and may come back.

A process that has died is started again, and a leader's peers need a moment to find the next
leader. Until then the fleet looks smaller than it is.
"""

from __future__ import annotations

from typing import Final

from millrace.core.scheduler.events import InstanceJoined

#: How long a lost instance is expected: it loads its model again.
AWAY_S: Final = 300.0
#: Stands for all instances that a former leader had, after a loss of the store's data.
FORGOTTEN: Final = "instances that the store has forgotten"


class Absences:
    """The instances that are away, by id."""

    def __init__(self) -> None:
        self._away: dict[str, tuple[float, InstanceJoined | None]] = {}

    def lost(self, card: InstanceJoined, now_s: float) -> None:
        """Notes that an instance was lost that had not said that it leaves."""
        self._away[card.instance_id] = now_s + AWAY_S, card

    def missing(self, instance_id: str, now_s: float) -> None:
        """Notes that an instance of the former leader's has not come; its size is not known."""
        self._away[instance_id] = now_s + AWAY_S, None

    def came(self, instance_id: str) -> None:
        self._away.pop(instance_id, None)

    def at(self, now_s: float) -> dict[str, InstanceJoined | None]:
        """Returns the cards of the instances that are away now; None where one is not known."""
        self._away = {name: one for name, one in self._away.items() if one[0] > now_s}
        return {name: card for name, (_, card) in self._away.items()}
