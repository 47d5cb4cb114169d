"""Refuses the messages of a scheduler that does not lead any more.

Every leader has an epoch, larger than the epochs of all leaders before it, and stamps its messages
with it. A scheduler that was paused and wakes does not know yet that another one leads: its peers
know, and take nothing from it.
"""

from __future__ import annotations


class EpochFence:
    """Remembers the largest epoch that its owner has seen."""

    def __init__(self) -> None:
        self.epoch = 0

    def admits(self, epoch: int) -> bool:
        """Returns whether a message of this epoch counts; False once a later epoch was seen."""
        if epoch < self.epoch:
            return False
        self.epoch = epoch
        return True
