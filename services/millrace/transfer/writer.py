"""A peer's right to write here, and the check that none of its writes can land any more."""

from __future__ import annotations

from dataclasses import dataclass

#: Seconds after a sender's end within which its writes in flight land or are lost.
GRACE_S = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class Writer:
    """A peer that may write here, and the known state of its end. Times are of the caller's clock.

    `renewed_s` is the time of the last message that renewed the peer's right to write; the peer
    stops by itself when it gets no such message for `lease_s`.
    """

    peer: str
    renewed_s: float
    drained: bool = False
    lost_s: float | None = None
    dead: bool = False

    def lose(self, now_s: float, *, dead: bool) -> None:
        """Marks the peer as unreachable; with `dead` its process is known to have ended."""
        if self.lost_s is None:
            self.lost_s = now_s
        self.dead = self.dead or dead

    def quiet(self, now_s: float, lease_s: float) -> bool:
        """Returns whether none of its writes can land any more.

        True once the peer sent that it has drained, or is dead, or is unreachable and its right to
        write has run out; the last two after a grace for writes in flight. A peer that is only
        silent may have been stopped in the middle of a write and continue it later: only its
        message or its end makes the memory safe.
        """
        if self.drained:
            return True
        if self.lost_s is None:
            return False
        stopped_s = self.lost_s if self.dead else max(self.lost_s, self.renewed_s + lease_s)
        return now_s >= stopped_s + GRACE_S
