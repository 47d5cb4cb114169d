"""Follows the lines that are in flight, and decides which parts of a file are merged. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from millrace.proxy.batches.batch import Place
from millrace.proxy.files.objects import Part

#: Lines that are read beyond the first line that is not done. Bounds `Place.ahead`.
MOST_AHEAD = 1024
#: As many parts of one tier are merged into a part of the next tier: n results make at most
#: `MERGED - 1` parts for each of about log(n) tiers, and a result is copied as often at most.
MERGED = 16
#: A part of tier t has less than this times `MERGED ** t` bytes.
TIER_BYTES = 64 << 10


class Progress:
    """The lines of an input: which are done, and where the first line that is not done begins."""

    def __init__(self, place: Place) -> None:
        self._line = place.line  # the first line that is not done
        self._next = place.line  # the next line to be read
        self._done = set(place.ahead)
        self._starts: dict[int, int] = {}  # first byte of lines that were read and are not passed
        self._end = place.offset  # of the last line that was read

    @property
    def has_room(self) -> bool:
        """Whether one more line may be read."""
        return self._next - self._line < MOST_AHEAD

    def read(self, end: int) -> int | None:
        """Takes the next line, which ends before byte `end`.

        Returns its number, or None if it was done before.
        """
        number = self._next
        self._starts[number] = self._end
        self._next, self._end = number + 1, end
        if number in self._done:
            self._pass()
            return None
        return number

    def done(self, number: int) -> None:
        """Counts a line that was read as done."""
        self._done.add(number)
        self._pass()

    @property
    def place(self) -> Place:
        """Returns the place up to which all is done, and the lines done after it."""
        return Place(
            line=self._line,
            offset=self._starts.get(self._line, self._end),
            ahead=sorted(self._done),
        )

    def _pass(self) -> None:
        while self._line in self._done and self._line < self._next:
            self._done.discard(self._line)
            self._starts.pop(self._line)
            self._line += 1


def tail_to_merge(parts: Sequence[Part]) -> int:
    """Returns how many of the last parts become one; 0 if they stay as they are.

    Parts before the last that are of no higher tier are merged with it once there are enough; the
    merged part may then be of a higher tier, and the last of enough parts there.
    """
    if not parts:
        return 0
    first, size_bytes = len(parts) - 1, parts[-1].size_bytes
    while True:
        start = first
        while start and _tier(parts[start - 1].size_bytes) <= _tier(size_bytes):
            start -= 1
        if first - start + 1 < MERGED:
            break
        size_bytes += sum(part.size_bytes for part in parts[start:first])
        first = start
    merged = len(parts) - first
    return merged if merged > 1 else 0


def _tier(size_bytes: int) -> int:
    tier, bound = 0, TIER_BYTES
    while size_bytes >= bound:
        tier, bound = tier + 1, bound * MERGED
    return tier


def joined(lines: Iterable[bytes]) -> bytes:
    """Returns lines as the end of a file of JSON lines."""
    return b"".join(line + b"\n" for line in lines)
