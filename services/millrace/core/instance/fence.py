"""Refuses the messages of a scheduler that does not lead any more.

Every leader has an epoch, later than the epochs of all leaders before it, and stamps its messages
with it. A scheduler that was paused and wakes does not know yet that another one leads: its peers
know, and take nothing from it. After the store has lost its data, a leader's epoch may not be later
than one before. Peers refuse this leader, too, but tell it what they have seen: it ends, and the
next leader's epoch is later (`scheduler.leadership`).
"""

from __future__ import annotations

from millrace.core.epochs import is_later


class EpochFence:
    """Remembers the latest epoch that its owner has seen; 0: none."""

    def __init__(self) -> None:
        self.epoch = 0

    def admits(self, epoch: int) -> bool:
        """Returns whether a message of this epoch counts: the epoch seen last, or a later one."""
        if self.epoch and epoch != self.epoch and not is_later(epoch, self.epoch):
            return False
        self.epoch = epoch
        return True
