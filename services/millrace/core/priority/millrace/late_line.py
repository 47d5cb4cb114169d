"""The requests that are not among those in time: given up for now, too late, or never due.

All are late in proportion: each is due at `arrival + stretch * size`, size being its isolated
prefill, and they go in the order in which they are due. The stretch is the same for all. It is the
smallest (in steps of `STEP`, at least `LEAST_STRETCH`) at which all of them are done when due with
a share of the pool, so it depends on their work and on nothing else. What of its share the line did
not get so far is its credit. A request that must start now to be done when due goes before
everything, so the share is theirs under any load.

This is the schedule of least maximum stretch (Bender, Chakrabarti and Muthukrishnan, "Flow and
stretch metrics for scheduling continuous job streams", SODA 1998), on a share of the pool. Requests
of one size go first come, first served.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from heapq import heapify, heappop, heappush

from millrace.core.priority.millrace.entry import Entry

#: The share of a pool that late requests are sure of.
LEAST_SHARE = 0.02
LEAST_STRETCH = 4.0
STEP = 1.5
#: A request is moved later by a larger stretch so many times. Then what it was promised stays, and
#: those who come later wait longer: else short requests would pass a long one for ever.
MOST_DELAYS = 3
#: The latest starts are sorted out when there are so many times as many as requests.
_OUTDATED = 8

_Row = tuple[float, int, Entry]  # when due, order of submission


class LateLine:
    """Late requests by when they are due."""

    def __init__(self) -> None:
        self._steps = 0
        self._rows: list[_Row] = []
        self._starts: list[tuple[float, int, Entry]] = []  # a heap: the latest start, a number
        self._pushed = 0
        self._now_s = 0.0
        self._credit = 0.0  # seconds times instances
        self._cursor: tuple[float, int] = (-math.inf, -1)
        self._work = 0.0  # of the rows up to the cursor, seconds times instances
        self._needed = 0.0  # the stretch that these rows need
        self._due_so_far = 0.0  # of these rows, the work of those that are due
        self.due_work = 0.0  # the same of all rows, as the last pass found it
        self._pass_s = 0.0  # when the pass over the rows began
        self._unfair: list[Entry] = []  # these rows whose tenant got ahead, or is no more
        self._stale: list[Entry] = []  # due by an earlier stretch

    @property
    def stretch(self) -> float:
        """Returns the multiple of its size that each request may wait now."""
        return LEAST_STRETCH * STEP**self._steps

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, entry: Entry, now_s: float) -> None:
        if not self._rows:
            self._credit, self._now_s = 0.0, now_s
        entry.work = entry.request.remaining_work_s(now_s)
        self._insert(entry, self.stretch)

    def remove(self, entry: Entry) -> None:
        self._credit -= entry.work - entry.request.remaining_work_s(self._now_s)
        self._take_out(entry)
        entry.due_s = math.inf
        entry.is_due = False

    def _take_out(self, entry: Entry) -> None:
        del self._rows[bisect_left(self._rows, (entry.due_s, entry.request.order))]

    def _insert(self, entry: Entry, stretch: float) -> None:
        entry.stretched(stretch)
        insort(self._rows, (entry.due_s, entry.request.order, entry))
        self._pushed += 1
        heappush(self._starts, (entry.latest_start_s, self._pushed, entry))
        if len(self._starts) > _OUTDATED * len(self._rows) + _OUTDATED:
            starts = [row for row in self._starts if row[2].latest_start_s == row[0]]
            self._starts = [row for row in starts if not row[2].is_due]
            heapify(self._starts)

    def update(self, now_s: float, capacity: float, most: int, moves: int) -> list[Entry]:
        """Returns the entries whose key has changed.

        It looks at `most` entries at most, and moves `moves` for each of two reasons: the stretch,
        and the time.
        """
        self._credit = max(0.0, self._credit + capacity * max(0.0, now_s - self._now_s))
        self._now_s = now_s
        changed = self._stretch_again(moves) or self._check(now_s, capacity, most, moves)
        for _ in range(moves):
            if not self._starts or self._starts[0][0] > now_s:
                break
            start_s, _, entry = heappop(self._starts)
            if entry.latest_start_s == start_s and not entry.is_due:
                entry.is_due = True
                changed.append(entry)
        return changed

    def _stretch_again(self, most: int) -> list[Entry]:
        changed: list[Entry] = []
        while self._stale and len(changed) < most:
            entry = self._stale.pop()
            ahead = entry.standing.ahead
            if math.isinf(entry.due_s) or (entry.is_due and not ahead > entry.yields):
                continue
            stretch = self.stretch
            if entry.delays == MOST_DELAYS:
                stretch = min(stretch, entry.stretch)
            if entry.stretch == stretch and entry.yields == ahead:
                continue
            entry.delays += entry.stretch < stretch
            entry.is_due = False
            self._take_out(entry)
            self._insert(entry, stretch)
            changed.append(entry)
        return changed

    def _check(self, now_s: float, capacity: float, most: int, moves: int) -> list[Entry]:
        """Continues a pass over all rows, and changes the stretch at its end."""
        rows = self._rows
        if self._cursor[1] < 0:
            self._work = self._needed = self._due_so_far = 0.0
            self._pass_s = now_s
            self._unfair = []
        at_s = self._pass_s
        first = bisect_right(rows, self._cursor, key=_rank)
        for due_s, order, entry in rows[first : first + most]:
            request = entry.request
            work = request.remaining_work_s(at_s)
            self._credit -= entry.work - work
            entry.work = work
            self._work += work
            if entry.is_due:
                self._due_so_far += work
            else:
                done_s = at_s + max(0.0, self._work - self._credit) / capacity
                size_s = entry.size_s * entry.patience
                self._needed = max(self._needed, (done_s - request.arrival_s) / size_s)
            ahead = entry.standing.ahead
            if entry.yields != ahead and (ahead or not entry.is_due):
                self._unfair.append(entry)
            self._cursor = (due_s, order)
        if first + most < len(rows):
            return []
        self._cursor = (-math.inf, -1)
        self._credit = min(self._credit, self._work)
        self.due_work = self._due_so_far
        steps = _steps(self._needed)
        if steps < self._steps:  # it falls step by step and with some room: the order changes too
            steps = min(self._steps, max(_steps(self._needed * STEP), self._steps - 1))
        if steps != self._steps:
            # Moved in part, the rows keep their order: the last go later first, the first sooner.
            moved = rows if steps > self._steps else reversed(rows)
            self._stale = [entry for _, _, entry in moved]
            self._steps = steps
        elif self._unfair:
            self._stale = self._unfair[::-1]
        else:
            return []
        return self._stretch_again(moves)


def _rank(row: _Row) -> tuple[float, int]:
    return row[0], row[1]


def _steps(stretch: float) -> int:
    """Returns how many steps reach `stretch`."""
    return max(0, math.ceil(math.log(max(stretch, LEAST_STRETCH) / LEAST_STRETCH, STEP) - 1e-9))
