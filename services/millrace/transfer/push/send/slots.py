"""The slots of a staging buffer, as their sender counts them."""

from __future__ import annotations

from millrace.transfer.push.handshake import SLOTS


class Slots:
    """Every use of a slot has a number of its own; the slot is the number modulo `SLOTS`.

    So a message that comes twice, or names a use that never was, frees nothing.
    """

    def __init__(self) -> None:
        self._free = list(range(SLOTS - 1, -1, -1))  # the next number of each free slot
        self._used: set[int] = set()

    @property
    def any_free(self) -> bool:
        return bool(self._free)

    @property
    def any_used(self) -> bool:
        return bool(self._used)

    def take(self) -> int:
        """Returns the number of the next use of a free slot."""
        number = self._free.pop()
        self._used.add(number)
        return number

    def free(self, number: int) -> bool:
        """Frees a slot after a use. Returns False if that use is over, or never was."""
        if number not in self._used:
            return False
        self._used.remove(number)
        self._free.append(number + SLOTS)
        return True
