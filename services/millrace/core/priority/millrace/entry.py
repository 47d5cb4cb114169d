"""A request in a ranking, and its key."""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Final

from millrace.core.live_request import LiveRequest
from millrace.core.priority.millrace.attainment import Band
from millrace.core.priority.millrace.tenants import Standing
from millrace.core.priority.ranking import PriorityKey

#: The parts of the order, first to last.
DUE, IN_TIME, IN_TIME_AFTER, GIVEN_UP, LATE, LATE_AFTER = 0.0, 1.0, 1.5, 2.0, 3.0, 4.0
#: After all parts: requests of the class `batch`, first come, first served.
BACKGROUND = 5.0
#: In words. "after others": its tenant is ahead of the others of its class.
PARTS: Final = MappingProxyType(
    {
        DUE: "due",
        IN_TIME: "in time",
        IN_TIME_AFTER: "in time, after others",
        GIVEN_UP: "given up",
        LATE: "late",
        LATE_AFTER: "late, after others",
        BACKGROUND: "background",
    }
)

#: Shorter prefills count as this long where a wait is a multiple of them.
LEAST_S = 0.1
#: A kept request on n instances goes as if it were due so many of its prefills, times (1 - 1/n),
#: earlier: its lead.
LEAD = 0.5
#: Smaller changes of a lead, as shares of the longest, change no key.
LEAD_STEP = 0.05


class Entry:
    """A request, the part of the order that it is in, and when it is due there."""

    __slots__ = (
        "background",
        "band",
        "delays",
        "due_s",
        "goes_s",
        "is_due",
        "keepable",
        "kept",
        "patience",
        "possible",
        "request",
        "size_s",
        "standing",
        "stretch",
        "work",
        "yields",
        "yields_kept",
    )

    def __init__(
        self,
        request: LiveRequest,
        band: Band | None,
        standing: Standing,
        *,
        background: bool = False,
    ) -> None:
        self.request: Final = request
        self.background: Final = background  # after all others, by arrival
        self.standing: Final = standing
        self.band: Final = band  # None: it has no objective
        self.size_s: Final = max(request.predicted_prefill_s, LEAST_S)
        self.possible = band is not None  # it could be in time if it went first
        self.kept = False  # among those that are to be in time
        self.keepable = False  # the same, as far as the sweep in progress has come
        self.stretch = 0.0  # of the late line: its wait as a multiple of `size_s`
        self.due_s = math.inf  # the end of that wait
        self.delays = 0  # times that it was moved later
        self.goes_s = request.deadline_s  # its place among the kept: deadline less lead
        self.work = 0.0  # left when it was last looked at, seconds times instances
        self.is_due = False  # it goes before all others
        self.patience = 1.0  # how much longer than others it may wait
        self.yields = False  # late, of a tenant that is ahead of its class
        self.yields_kept = False  # kept, likewise

    @property
    def key(self) -> PriorityKey:
        if self.background:
            return (BACKGROUND, self.request.arrival_s)
        if self.is_due:
            return (DUE, self.due_s)
        if self.possible and self.kept:
            return (IN_TIME_AFTER if self.yields_kept else IN_TIME, self.goes_s)
        if self.yields:
            return (LATE_AFTER, self.due_s)
        if self.possible:
            return (GIVEN_UP, self.request.deadline_s)
        return (LATE, self.due_s)

    @property
    def waits_a_stretch(self) -> bool:
        """Whether its wait is a multiple of its size: it is not to be in time."""
        return not self.background and not (self.band is not None and self.kept)

    @property
    def latest_start_s(self) -> float:
        return self.due_s - self.size_s

    def leads(self, longest_s: float) -> bool:
        """Sets its lead, at most `longest_s`; returns whether its place among the kept changes."""
        request = self.request
        alone_s, work = request.predicted_prefill_s, request.predicted_work_s
        spread = 1.0 - alone_s / work if work > alone_s else 0.0  # 1 - 1/n on a group of n
        goes_s = request.deadline_s - min(LEAD * spread * alone_s, longest_s)
        if abs(goes_s - self.goes_s) <= LEAD_STEP * longest_s:
            return False
        self.goes_s = goes_s
        return True

    def stretched(self, stretch: float) -> None:
        """Has its wait end after so many times its size, or more if its tenant is ahead."""
        self.stretch = stretch
        self.yields = self.standing.ahead
        if self.yields:
            self.patience = max(self.patience, self.standing.patience)
        self.due_s = self.request.arrival_s + stretch * self.size_s * self.patience


def words(key: PriorityKey, now_s: float) -> str:
    """Returns the part and the time in it."""
    part, at_s = key
    if part == BACKGROUND:
        return f"{PARTS[part]}: arrived {now_s - at_s:.3g} s ago"
    what = "to be done" if part in (DUE, LATE, LATE_AFTER) else "deadline"
    left_s = at_s - now_s
    when = f"in {left_s:.3g} s" if left_s > 0.0 else f"{-left_s:.3g} s ago"
    return f"{PARTS[part]}: {what} {when}"
