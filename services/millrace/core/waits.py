"""How long a request has waited, for what, and in which part of the policy's order."""

from __future__ import annotations

from typing import Final

DECODE_ROOM: Final = "room at a decode instance"
PREFILL: Final = "a prefill instance"
TURN: Final = "its turn at its instances"
COMPUTING: Final = "nothing: it computed"
SUSPENDED: Final = "the requests that suspended it"

#: So many requests that suspended it are kept, the last ones.
MOST_NAMED: Final = 8


class Waits:
    """The seconds of one request, by reason and part. Each note ends the time before it."""

    __slots__ = ("_since_s", "part", "reason", "seconds", "suspended_by")

    def __init__(self, arrival_s: float) -> None:
        self._since_s = arrival_s
        self.reason = DECODE_ROOM
        self.part = ""  # of the policy's order; empty where the policy has none
        self.seconds: dict[tuple[str, str], float] = {}
        self.suspended_by: tuple[str, ...] = ()

    def enter(self, reason: str, now_s: float) -> None:
        """Notes that from now on it waits for something else."""
        self._count(now_s)
        self.reason = reason

    def move(self, part: str, now_s: float) -> None:
        """Notes that from now on it is in this part of the order."""
        if part != self.part:
            self._count(now_s)
            self.part = part

    def suspend(self, by: tuple[str, ...], now_s: float) -> None:
        """Notes that these requests run in its place."""
        self.enter(SUSPENDED, now_s)
        new = tuple(name for name in by if name not in self.suspended_by)
        self.suspended_by = (*self.suspended_by, *new)[-MOST_NAMED:]

    def end(self, now_s: float) -> None:
        """Notes that it waits no more: it has its first token, or ended."""
        self._count(now_s)
        self.reason = ""

    def until(self, now_s: float) -> dict[tuple[str, str], float]:
        """Returns the seconds by (reason, part), of what it waits for now up to `now_s`."""
        found = dict(self.seconds)
        if self.reason:
            here = (self.reason, self.part)
            found[here] = found.get(here, 0.0) + now_s - self._since_s
        return found

    def _count(self, now_s: float) -> None:
        if self.reason:
            here = (self.reason, self.part)
            self.seconds[here] = self.seconds.get(here, 0.0) + now_s - self._since_s
        self._since_s = now_s
