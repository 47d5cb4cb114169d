"""Numbers the events of a resumable stream, so that a client can say which event it saw last.

An event's id is its number and the CRC-32 of all events up to it. Both depend on the tokens alone:
every replica that has the tokens makes the same ids. A replay whose event of that number has
another checksum is not the stream that the client saw.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from zlib import crc32

#: How an event's id is written.
ID_PATTERN = "([1-9][0-9]{0,15})-([0-9a-f]{8})"


@dataclass(frozen=True, slots=True)
class EventId:
    """The number of an event, from 1, and the checksum of the events up to it."""

    number: int
    checksum: int

    def __str__(self) -> str:
        return f"{self.number}-{self.checksum:08x}"


def read_event_id(text: str) -> EventId | None:
    """Returns None for a text that is no event's id."""
    found = re.fullmatch(ID_PATTERN, text)
    return None if found is None else EventId(int(found[1]), int(found[2], 16))


class EventNumbers:
    """Gives the events of one stream their ids, and leaves out the events up to `after`."""

    def __init__(self, after: EventId | None = None) -> None:
        self._after = after or EventId(0, 0)
        self._number = self._checksum = 0
        #: True if the events up to `after` are not those that the client saw.
        self.diverged = False

    @property
    def reached(self) -> bool:
        """Whether the event `after` has come."""
        return self._number >= self._after.number

    def numbered(self, event: bytes) -> bytes:
        """Returns an event with its id; empty bytes if the client has the event, or another."""
        self._number += 1
        self._checksum = crc32(event, self._checksum)
        if self._number == self._after.number and self._checksum != self._after.checksum:
            self.diverged = True
        if self.diverged or self._number <= self._after.number:
            return b""
        return b"id: %d-%08x\n%s" % (self._number, self._checksum, event)
