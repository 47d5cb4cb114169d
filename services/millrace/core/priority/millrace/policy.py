"""Millrace's own order: as many requests of every class in time as can be, and a bounded wait.

1. In time. Requests with an objective are taken by deadline. A request is kept if all requests kept
   so far, and the more urgent work that is yet to come (`forecast`), can be done by then; if not,
   the kept request with the most work left per value (`attainment`) is given up. With equal values
   and nothing to come, the kept are the largest set that can be in time (Moore, "An n job, one
   machine sequencing algorithm for minimizing the number of late jobs", Management Science 15(1),
   1968, on remaining work, since preemption makes finished work count). The set runs by deadline
   less lead. By deadline alone is optimal for a set that can be done in time on one instance; but a
   group runs only while no member has more urgent work, and if groups put each other off, all of
   them end late. So a request on a group has a lead (`Entry.leads`) in proportion to its whole
   prefill: a started one keeps its place. Others are delayed by it, so the lead is at most
   `LONGEST_LEAD` usual objectives, and 0 where all together have nothing to spare.
2. Given up for now. Requests that could be in time, but not all, use the remaining time, by
   deadline. Later a request among them may be in time after all: that is found again.
3. Late. Then go requests that are too late in any case, and those without an objective, all
   stretched by the same factor (`late_line`).
4. Due. A request of 2 or 3 that has waited as long as that factor says goes before all, so these
   requests have a share of the pool under any load, and every wait is bounded.

5. Background. Requests of the class `batch` go after all others, in the order of their arrival.
   They can wait for hours: no share of the pool is theirs, and their outcomes count nowhere.

Tenants that are ahead of the others of their class (`tenants`) are given up first, and go last
within 1, and after 3 instead of in 2 and 3. With one tenant there is no such difference.

Against FlowPrefill's S-EDF: S-EDF gives up a request only once it is too late for it alone, after
it has served the request (and delayed others) until then. Against Medha's LARS: relative slack
shares lateness evenly, which under load makes all requests late. Both leave the wait of requests
that they give up unbounded.

Work is counted as seconds times the instances of the group; a pool does `instances` such seconds
per second. An update looks at `MOST` requests at most, and the next one goes on
from there: with more requests than that the set is a few updates old. It moves a few times `MOVES`.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping
from heapq import heappop, heappush

from millrace.core.live_request import LiveRequest
from millrace.core.priority.millrace.attainment import Attainments
from millrace.core.priority.millrace.entry import PARTS, Entry, words
from millrace.core.priority.millrace.forecast import Forecast, Row
from millrace.core.priority.millrace.late_line import LEAST_SHARE, LateLine
from millrace.core.priority.millrace.tenants import Tenants
from millrace.core.priority.ranking import PriorityKey, RankDetails
from millrace.core.weights import Weights

#: Requests with an objective that an update looks at, and as many late ones.
MOST = 48
#: Requests that an update moves for each reason: kept or given up, another stretch, due now.
MOVES = 24
#: The longest lead, in usual objectives of the last arrivals.
LONGEST_LEAD = 2.0


class MillracePolicy:
    """The policy, and how its classes fare."""

    name = "millrace"

    def __init__(self) -> None:
        self.attainments = Attainments()
        self.tenants = Tenants()

    def ranking(self) -> MillraceRanking:
        return MillraceRanking(self.attainments, self.tenants)

    def weigh(self, weights: Weights) -> None:
        self.attainments.weigh(weights.classes)
        self.tenants.weigh(weights.tenants)

    def started(self, request: LiveRequest) -> None:
        self.tenants.started(request)

    def first_token(self, request: LiveRequest, now_s: float) -> None:
        if request.allowed_ttft_s is not None and request.in_time is None:
            in_time = now_s <= request.deadline_s
            if not in_time or (request.slo.tbt_s is None and request.slo.e2e_s is None):
                self._judge(request, in_time)
        self.tenants.computed(request)

    def finished(self, request: LiveRequest, now_s: float, tbt_s: float | None) -> None:
        slo = request.slo
        if request.in_time is not None or (slo.tbt_s is None and slo.e2e_s is None):
            return
        in_time = slo.tbt_s is None or tbt_s is None or tbt_s <= slo.tbt_s
        if slo.e2e_s is not None:
            in_time = in_time and now_s - request.arrival_s <= slo.e2e_s
        self._judge(request, in_time)

    def _judge(self, request: LiveRequest, in_time: bool) -> None:
        background = self.attainments.is_background(request)
        counts = 0.0 if background else self.tenants.counts(request)
        self.attainments.judge(request, in_time, counts)

    def ended(self, request: LiveRequest, now_s: float) -> None:
        self.tenants.ended(request, now_s)

    def value(self, request: LiveRequest) -> float:
        return self.attainments.band(request).value


class _Sweep:
    """A pass over the requests with an objective, by deadline, as of the time of its start."""

    __slots__ = (
        "capacity",
        "crowded",
        "cursor",
        "densest",
        "drops",
        "expected",
        "flips",
        "kept",
        "longest_lead_s",
        "now_s",
        "passed",
        "visits",
        "work",
    )

    def __init__(
        self, now_s: float, capacity: float, work: float, longest_lead_s: float, *, crowded: bool
    ) -> None:
        self.now_s = now_s
        self.capacity = capacity
        self.crowded = crowded  # the last pass gave up requests
        self.drops = 0  # requests given up
        self.work = work  # of the kept, seconds times instances
        self.longest_lead_s = longest_lead_s
        self.kept: list[tuple[float, int, float, Entry]] = []  # a heap: most work per value first
        self.flips: dict[Entry, None] = {}
        self.passed: list[Entry] = []  # in this update: their deadline is over
        self.visits = 0
        self.densest = math.nan  # the most work per value of the kept
        self.expected: Row = []  # the arrivals to come of at most that
        self.cursor: tuple[float, int] = (-math.inf, -1)


class MillraceRanking:
    """The requests of a queue in Millrace's order."""

    def __init__(self, attainments: Attainments, tenants: Tenants) -> None:
        self._attainments = attainments
        self._tenants = tenants
        self._forecast = Forecast()
        self._entries: dict[str, Entry] = {}
        self._timed: list[tuple[float, int, Entry]] = []  # by deadline; not those that passed it
        self._late = LateLine()
        self._due: dict[Entry, None] = {}
        self._sweep: _Sweep | None = None
        self._crowded = False  # the last sweep gave up requests
        self._flips: list[Entry] = []  # of the last sweep, still to be carried out, last first
        self._now_s = 0.0
        self._stated = 0.0  # work of the last arrivals, decaying; with an objective
        self._unstated = 0.0

    # ---- as Ranking

    def add(self, request: LiveRequest, now_s: float) -> PriorityKey:
        self._now_s = now_s
        self._tenants.join(request)
        entry = self._entry(request)
        self._entries[request.id] = entry
        if entry.background:
            request.waits.move(PARTS[entry.key[0]], now_s)
            return entry.key
        if entry.band is not None:
            insort(self._timed, (request.deadline_s, request.order, entry))
        entry.possible = _possible(request, entry, now_s)
        entry.kept = entry.possible and not entry.standing.ahead
        entry.leads(self._longest_lead_s())
        if not entry.kept:
            self._late.add(entry, now_s)
        if not request.attempts:
            self._arrived(request, entry)
        request.waits.move(PARTS[entry.key[0]], now_s)
        return entry.key

    def _entry(self, request: LiveRequest) -> Entry:
        if self._attainments.is_background(request):
            return Entry(request, None, self._tenants.standing(request), background=True)
        band = None if request.allowed_ttft_s is None else self._attainments.band(request)
        return Entry(request, band, self._tenants.standing(request))

    def _arrived(self, request: LiveRequest, entry: Entry) -> None:
        work, keep = request.predicted_work_s, 1.0 - 1.0 / 400
        allowed_s = request.allowed_ttft_s
        self._stated *= keep
        self._unstated *= keep
        if entry.band is None or allowed_s is None:
            self._unstated += work
            return
        self._stated += work
        if entry.possible or entry.standing.is_alone:
            density = work / entry.band.value * entry.standing.factor
            self._forecast.arrived(request.arrival_s, work, allowed_s, density)

    def remove(self, request: LiveRequest) -> None:
        entry = self._entries.pop(request.id)
        if entry.background:
            return
        if entry.band is not None:
            self._untime(entry)
        if not entry.kept:
            self._late.remove(entry)
            self._due.pop(entry, None)

    def _untime(self, entry: Entry) -> None:
        rank = (entry.request.deadline_s, entry.request.order)
        index = bisect_left(self._timed, rank)
        if index < len(self._timed) and self._timed[index][2] is entry:
            del self._timed[index]

    def replace(self, old: LiveRequest, new: LiveRequest) -> PriorityKey:
        self.remove(old)
        return self.add(new, self._now_s)

    def key(self, request: LiveRequest, now_s: float) -> PriorityKey:
        entry = self._entry(request)
        if entry.background:
            return entry.key
        entry.possible = _possible(request, entry, now_s)
        entry.kept = entry.possible and not entry.standing.ahead
        entry.leads(self._longest_lead_s())
        entry.stretched(self._late.stretch)
        return entry.key

    def part(self, key: PriorityKey) -> str:
        return PARTS[key[0]]

    def describe(self, request: LiveRequest, key: PriorityKey, now_s: float) -> RankDetails:
        entry = self._entries.get(request.id)
        return RankDetails(
            key=words(key, now_s),
            attainment=self._attainments.of_class(request.slo.class_name),
            value=entry.band.value if entry is not None and entry.band is not None else None,
            stretch=entry.stretch if entry is not None and entry.waits_a_stretch else None,
        )

    def update(self, now_s: float, instances: int) -> Mapping[str, PriorityKey]:
        self._now_s = now_s
        capacity = float(max(instances, 1))
        self._tenants.resize(capacity)
        changed: dict[str, PriorityKey] = {}
        self._attainments.refresh()
        if not self._flips and self._timed:
            self._continue_sweep(now_s, capacity)
        self._carry_out(changed)
        if len(self._late):
            share = max(LEAST_SHARE, self._unstated_share)
            for entry in self._late.update(now_s, share * capacity, MOST, MOVES):
                changed[entry.request.id] = entry.key
                if entry.is_due:
                    self._due[entry] = None
                else:
                    self._due.pop(entry, None)
        for name, key in changed.items():
            self._entries[name].request.waits.move(PARTS[key[0]], now_s)
        return changed

    @property
    def _unstated_share(self) -> float:
        """Returns the share of work without an objective among the last arrivals."""
        total = self._stated + self._unstated
        return self._unstated / total if total > 0.0 else 0.0

    # ---- those in time

    def _continue_sweep(self, now_s: float, capacity: float) -> None:
        sweep, timed = self._sweep, self._timed
        if sweep is None:
            capacity *= 1.0 - self._unstated_share
            due, longest_lead_s = self._due_work(now_s), self._longest_lead_s()
            sweep = _Sweep(now_s, capacity, due, longest_lead_s, crowded=self._crowded)
            self._sweep = sweep
        first = bisect_right(timed, sweep.cursor, key=_rank)
        rows = timed[first : first + MOST]
        for _, _, entry in rows:
            self._visit(sweep, entry)
        if rows:
            sweep.cursor = _rank(rows[-1])
        is_over = first + MOST >= len(timed)
        for entry in sweep.passed:
            self._untime(entry)
        sweep.passed.clear()
        if not is_over:
            return
        self._sweep = None
        self._crowded = sweep.drops > 0
        self._flips = list(sweep.flips)
        self._flips.reverse()

    def _due_work(self, now_s: float) -> float:
        """Returns the work of those that are due; as of a while ago, if there are many."""
        if len(self._due) > MOST:
            return self._late.due_work
        return sum(entry.request.remaining_work_s(now_s) for entry in self._due)

    def _longest_lead_s(self) -> float:
        """Returns the bound of leads now."""
        usual_s = self._forecast.usual_objective_s
        return LONGEST_LEAD * usual_s * self._attainments.headroom

    def _visit(self, sweep: _Sweep, entry: Entry) -> None:
        """Keeps the entry, and gives up what can't be in time with it."""
        request, kept, now_s = entry.request, sweep.kept, sweep.now_s
        if entry.is_due:
            return
        left_s = request.remaining_s(now_s)
        horizon_s = request.deadline_s - now_s
        possible = left_s <= horizon_s
        if possible != entry.possible:
            entry.possible = possible
            sweep.flips[entry] = None
        if not possible:
            if horizon_s < 0.0:
                sweep.passed.append(entry)
                self._missed(request)
            entry.keepable = False
            return
        assert entry.band is not None
        yields = sweep.crowded and entry.standing.ahead
        leads = entry.leads(sweep.longest_lead_s) and entry.kept
        if leads or yields != entry.yields_kept:
            entry.yields_kept = yields
            sweep.flips[entry] = None
        work = request.work_of(left_s)
        sweep.visits += 1
        density = work / entry.band.value * entry.standing.factor
        heappush(kept, (-density, sweep.visits, work, entry))
        sweep.work += work
        entry.keepable = True
        if not entry.kept:
            sweep.flips[entry] = None
        room = sweep.capacity * horizon_s
        while len(kept) > 1 and sweep.work + self._expected(sweep, horizon_s) > room:
            _, _, work, dropped = heappop(kept)
            sweep.work -= work
            sweep.drops += 1
            dropped.keepable = False
            if dropped.kept:
                sweep.flips[dropped] = None

    def _expected(self, sweep: _Sweep, horizon_s: float) -> float:
        """Returns the work to come that goes before the kept ones' last, in its place or theirs."""
        densest = -sweep.kept[0][0]
        if densest != sweep.densest:
            sweep.densest, sweep.expected = densest, self._forecast.row(densest)
        return self._forecast.work(sweep.expected, horizon_s)

    def _carry_out(self, changed: dict[str, PriorityKey]) -> None:
        """Moves entries to the part of the order where the last sweep found them to be."""
        flips = self._flips
        for _ in range(min(len(flips), MOVES)):
            entry = flips.pop()
            if self._entries.get(entry.request.id) is entry:
                if entry.keepable != entry.kept:
                    self._flip(entry)
                changed[entry.request.id] = entry.key

    def _flip(self, entry: Entry) -> None:
        if entry.kept:
            entry.kept = False
            self._late.add(entry, self._now_s)
        else:
            self._late.remove(entry)
            self._due.pop(entry, None)
            entry.kept = True

    def _missed(self, request: LiveRequest) -> None:
        if request.in_time is None:
            self._attainments.judge(request, False, self._tenants.counts(request))


def _possible(request: LiveRequest, entry: Entry, now_s: float) -> bool:
    """Returns whether the request would be in time alone."""
    return entry.band is not None and now_s + request.remaining_s(now_s) <= request.deadline_s


def _rank(row: tuple[float, int, Entry]) -> tuple[float, int]:
    return row[0], row[1]
