"""The tenants of a class share what their class gets, by weight: virtual token counters.

Sheng et al., "Fairness in Serving Large Language Models", OSDI 2024, Algorithm 2 (VTC), with a
counter for each tenant and class:

    c_i += work / weight_i        when the prefill of a request of tenant i starts
    c_i  = max(c_i, least)        when tenant i comes back; least: of the tenants that are there

A tenant is there (the paper: backlogged) while a request of it has no first token. Its lead is how
far its counter is above the mean of those there, in units of the scale: `SCALE_S` seconds of the
whole pool, or the mean work of a request if that is more. A tenant is `ahead` from a lead of two
on, until the lead is back at one. With one tenant there, every lead is 0. The policy uses leads
where not all can be in time:

- The value of a request is divided by `factor` = exp(lead). So the requests of a tenant that is
  ahead are given up first, and those that it is yet to send take no place from the others.
- Requests of a tenant that is ahead go after the others in time (by deadline among themselves)
  while some request is given up: a pool that is full of its requests delays nobody else.
- Outcomes of such a tenant count 1 / factor in the attainments: its flood does not make its class
  look behind, which would take time from other classes. Where several tenants are there, a request
  that could not have been in time alone does not count at all.
- Late requests and those given up, of a tenant that is ahead, go after the others'. They are due
  after `patience` times the stretch of the others: twice the sum of the weights over its own, since
  its share of the pool is their inverse. So each wait stays bounded.

Deviations from the paper, and reasons. Service is predicted prefill work (seconds times instances)
instead of tokens: the order shares the prefill pool, and a token costs more the later it stands in
its prompt. Tokens of answers don't count: all answers of a decode instance advance in the same
step. The lead is above the mean instead of the least: tenants that ask for less than their share
are not played off against each other. The tenant with the least counter goes first only where not
all can be in time. A lead is limited to `MOST_LEAD` scales and twice the largest request: a tenant
that gets all it asks for does not save up a claim without bound.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from heapq import heappop, heappush, heapreplace

from millrace.core.live_request import LiveRequest

#: Seconds of the whole pool by which one tenant may lead before its requests lose a factor of e.
SCALE_S = 0.25
#: The largest lead, in scales (and twice the largest request), and that of which exp is taken.
MOST_LEAD = 12.0
MOST_LOG = 60.0
#: `ahead` begins and ends at these leads, in scales.
AHEAD_FROM, AHEAD_UNTIL = 2.0, 1.0
#: A tenant that is ahead waits up to this many times its fair wait.
PATIENCE = 2.0
#: Tenants that are not there and whose counters are kept, in each class.
MOST_IDLE = 1024
#: The weight of a new request in the mean work of a class.
_ALPHA = 1 / 100


class Standing:
    """What a tenant has been given in a class."""

    __slots__ = ("_ahead", "counter", "debt", "group", "listed", "requests", "weight")

    def __init__(self, group: _Group, weight: float) -> None:
        self.group = group
        self.weight = weight
        self.counter = 0.0  # seconds times instances, over the weight
        self.debt = 0.0  # charged too much so far: the next work is free
        self.requests = 0  # without a first token
        self.listed = False  # in the heap of its group
        self._ahead = False

    @property
    def is_alone(self) -> bool:
        """Returns whether no other tenant of its class is there."""
        return self.group.there < 2

    @property
    def factor(self) -> float:
        """Returns what the value of the tenant's requests is divided by: 1 or more."""
        return math.exp(min(MOST_LOG, self.group.lead(self))) if self.group.there > 1 else 1.0

    @property
    def ahead(self) -> bool:
        """Returns whether the others of its class go first in the late line."""
        if self.group.there < 2:
            self._ahead = False
        else:
            self._ahead = self.group.lead(self) > (AHEAD_UNTIL if self._ahead else AHEAD_FROM)
        return self._ahead

    @property
    def patience(self) -> float:
        """Returns the multiple of the others' stretch that the tenant may wait while `ahead`."""
        return max(1.0, PATIENCE * self.group.weight / self.weight)


class _Group:
    """The tenants of one class."""

    __slots__ = (
        "heap",
        "idle",
        "largest",
        "least",
        "mean",
        "scale",
        "standings",
        "there",
        "top",
        "total",
        "weight",
    )

    def __init__(self) -> None:
        self.standings: dict[str, Standing] = {}
        self.idle: dict[str, None] = {}  # the longest first
        self.heap: list[tuple[float, str]] = []  # of those there; counters may have grown since
        self.there = 0
        self.weight = 0.0  # of all that are there
        self.total = 0.0  # of their counters times weights
        self.least = 0.0  # the counter of the least, when it was last looked for
        self.top = 0.0  # the largest counter
        self.mean = 0.0  # work of a request
        self.largest = 0.0  # the same of the largest of the last ones, over the weight
        self.scale = SCALE_S  # of a lead, as a work

    def enter(self, name: str, standing: Standing) -> None:
        standing.counter = max(standing.counter, self.find_least())
        self.idle.pop(name, None)
        self.there += 1
        self.weight += standing.weight
        self.total += standing.weight * standing.counter
        if not standing.listed:
            standing.listed = True
            heappush(self.heap, (standing.counter, name))

    def leave(self, name: str, standing: Standing) -> None:
        self.find_least()
        self.there -= 1
        self.weight -= standing.weight
        self.total -= standing.weight * standing.counter
        self.idle[name] = None
        if not self.there:
            self.weight, self.total, self.least = 0.0, 0.0, standing.counter
        if len(self.idle) > MOST_IDLE:
            oldest = next(iter(self.idle))
            del self.idle[oldest], self.standings[oldest]

    def find_least(self) -> float:
        """Returns the least counter of those there; with none there, that of the last one."""
        heap, standings = self.heap, self.standings
        while heap:
            counter, name = heap[0]
            standing = standings.get(name)
            if standing is None or not standing.requests:
                heappop(heap)
                if standing is not None:
                    standing.listed = False
            elif standing.counter > counter:
                heapreplace(heap, (standing.counter, name))
            else:
                self.least = counter
                break
        return self.least

    @property
    def _floor(self) -> float:
        """Returns how far back a counter may be."""
        most = MOST_LEAD * self.scale * self.there / self.weight
        return self.top - most - 2.0 * self.largest

    def lead(self, standing: Standing) -> float:
        lead = standing.counter - max(self.total / self.weight, self._floor)
        return lead * self.weight / (self.there * self.scale) if lead > 0.0 else 0.0

    def serve(self, standing: Standing, work: float) -> None:
        free = min(standing.debt, work)
        standing.debt -= free
        normalised = (work - free) / standing.weight
        before = standing.counter
        standing.counter = max(before, self._floor) + normalised
        self.total += standing.weight * (standing.counter - before)
        self.top = max(self.top, standing.counter)
        self.mean += _ALPHA * (work - self.mean) if self.mean else work
        self.largest = max(normalised, self.largest * (1.0 - _ALPHA))


class _Open:
    """A request without a first token."""

    __slots__ = ("charged", "standing")

    def __init__(self, standing: Standing) -> None:
        self.standing = standing
        self.charged = 0.0


class Tenants:
    """The standings of all tenants in all classes."""

    def __init__(self) -> None:
        self._weights: Mapping[str, float] = {}
        self._groups: dict[str, _Group] = {}
        self._open: dict[str, _Open] = {}

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Takes other weights from now on; what was served before counts by the earlier ones."""
        self._weights = weights
        for group in self._groups.values():
            for name, standing in group.standings.items():
                standing.weight = weights.get(name, 1.0)
            there = (one for one in group.standings.values() if one.requests)
            group.weight = group.total = 0.0
            for one in there:
                group.weight += one.weight
                group.total += one.weight * one.counter

    def resize(self, instances: float) -> None:
        """Notes how many instances work on the requests."""
        for group in self._groups.values():
            group.scale = max(SCALE_S * instances, group.mean)

    def standing(self, request: LiveRequest) -> Standing:
        """Returns the standing of the request's tenant in the request's class."""
        group = self._groups.get(request.slo.class_name)
        if group is None:
            group = self._groups[request.slo.class_name] = _Group()
        standing = group.standings.get(request.tenant)
        if standing is None:
            weight = self._weights.get(request.tenant, 1.0)
            standing = group.standings[request.tenant] = Standing(group, weight)
        return standing

    def join(self, request: LiveRequest) -> Standing:
        """Notes a request without a first token; harmless if it is known."""
        known = self._open.get(request.id)
        if known is not None:
            return known.standing
        standing = self.standing(request)
        if not standing.requests:
            standing.group.enter(request.tenant, standing)
        standing.requests += 1
        self._open[request.id] = _Open(standing)
        return standing

    def started(self, request: LiveRequest) -> None:
        """Charges the tenant with all of the request's work, once."""
        known = self._open.get(request.id)
        if known is not None:
            self._charge(known, _work(request))

    def computed(self, request: LiveRequest) -> None:
        """Notes that the request has its first token."""
        known = self._open.get(request.id)
        if known is not None:
            self._charge(known, _work(request))
            self._close(request)

    def ended(self, request: LiveRequest, now_s: float) -> None:
        """Notes that the request ended before its first token: only the work done counts."""
        known = self._open.get(request.id)
        if known is not None:
            work = _work(request)
            if request.predicted_prefill_s > 0.0:
                work *= 1.0 - request.remaining_s(now_s) / request.predicted_prefill_s
            self._charge(known, work)
            known.standing.debt += max(0.0, known.charged - work)
            self._close(request)

    def counts(self, request: LiveRequest) -> float:
        """Returns the weight of the request's outcome in the attainment of its class, 0 to 1."""
        standing = self.standing(request)
        if standing.is_alone:
            return 1.0
        alone_s = request.arrival_s + request.predicted_prefill_s
        return 1.0 / standing.factor if alone_s <= request.deadline_s else 0.0

    def _charge(self, known: _Open, work: float) -> None:
        if work > known.charged:
            known.standing.group.serve(known.standing, work - known.charged)
            known.charged = work

    def _close(self, request: LiveRequest) -> None:
        standing = self._open.pop(request.id).standing
        standing.requests -= 1
        if not standing.requests:
            standing.group.leave(request.tenant, standing)


def _work(request: LiveRequest) -> float:
    """Returns the predicted seconds times instances; an instance that packs its own batches has
    its seconds only.
    """
    return request.predicted_work_s or request.predicted_prefill_s
