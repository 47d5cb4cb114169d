"""A peer's right to write here, and the check that none of its writes can land any more."""

from __future__ import annotations

from dataclasses import dataclass

#: After a sender's end is established, writes already on their way land or are lost within this.
GRACE_S = 1.0


@dataclass(slots=True, kw_only=True, eq=False)
class Writer:
    """A peer that may write here, and what is known of its end. Times are of the caller's clock.

    `renewed_s` is when it was last told that it may go on; it stops by itself when it hears nothing
    for `lease_s`.
    """

    peer: str
    renewed_s: float
    drained: bool = False
    lost_s: float | None = None
    dead: bool = False

    def lose(self, now_s: float, *, dead: bool) -> None:
        """It is unreachable; with `dead` its process is known to have ended."""
        if self.lost_s is None:
            self.lost_s = now_s
        self.dead = self.dead or dead

    def quiet(self, now_s: float, lease_s: float) -> bool:
        """Whether no write of its can land any more.

        True once it said so, or its process is known to be dead, or it is unreachable and its right
        to write has run out; the last two after a grace for what was on its way. One that is only
        silent may have been stopped in the middle of a write and go on with it later: nothing but
        its word or its end makes that safe.
        """
        if self.drained:
            return True
        if self.lost_s is None:
            return False
        stopped_s = self.lost_s if self.dead else max(self.lost_s, self.renewed_s + lease_s)
        return now_s >= stopped_s + GRACE_S
