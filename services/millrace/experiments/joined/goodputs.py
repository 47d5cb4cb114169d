"""The loads that a policy carries when all requests count, every class, or every length band.

One load is one point of a geometric grid, so that policies are compared at the same loads and a run
serves all three searches. A run ends early where what it is for is out of reach.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from millrace.sim.results.report import RequestRecord
from millrace.sim.scenario import Scenario, Watch, misses_allowed, simulate
from millrace.sim.workload.workload import PlannedRequest

#: Numbers of requests, in order of arrival.
Places = npt.NDArray[np.intp]

#: The share in time that is asked for.
GOAL = 0.9
#: The ratio of neighbouring loads.
STEP = 1.04
#: A length band of a class counts from so many requests, and from this share of the run's.
LEAST_REQUESTS = 20
LEAST_OF_ALL = 0.005
#: Shorter prefills count as this long where a wait is divided by them.
LEAST_S = 0.5
#: Attainments of a class with few requests don't fall steadily: a search ends where so many steps
#: in a row are not carried.
LOOK_AHEAD = 4
#: A search gives up so many steps above and below its start.
REACH = 200

CRITERIA = ("requests", "classes", "bands")


@dataclass(frozen=True, slots=True, kw_only=True)
class Fairness:
    """How the requests of one run fared.

    `by_requests`, `by_classes`, `by_bands`: the share in time of all requests, of the worst class
    and of the worst band. A slowdown is a TTFT in isolated prefills (of `LEAST_S` at least); Jain's
    index is of their inverses, 1 when all requests are slowed down alike.
    """

    in_time: dict[str, float]
    classes: dict[str, float]
    mean_slowdown: float
    p99_slowdown: float
    longest_wait: float
    jain: float


def band(tokens: int) -> int:
    """Returns the number of a prompt's length band: lengths within a factor of 8 share one."""
    return (tokens.bit_length() + 2) // 3


class Tally:
    """Counts what is in time by class and band."""

    def __init__(self) -> None:
        self._of: dict[tuple[str, int], list[int]] = defaultdict(lambda: [0, 0])
        self._slowdowns: list[float] = []
        self._longest = 0.0

    def saw(self, record: RequestRecord) -> None:
        found = self._of[record.class_name, band(record.input_tokens)]
        found[0] += 1
        found[1] += _in_time(record)
        least_s = max(record.isolated_s, LEAST_S)
        self._slowdowns.append(max(record.ttft_s, least_s) / least_s)
        self._longest = max(self._longest, (record.queued_s + record.suspended_s) / least_s)

    def fairness(self) -> Fairness:
        requests = len(self._slowdowns)
        classes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        for (name, _), (count, met) in self._of.items():
            classes[name][0] += count
            classes[name][1] += met
        shares = {name: met / count for name, (count, met) in sorted(classes.items())}
        least = max(LEAST_REQUESTS, LEAST_OF_ALL * requests)
        bands = [met / count for count, met in self._of.values() if count >= least]
        rates = [1.0 / slowdown for slowdown in self._slowdowns]
        ordered = sorted(self._slowdowns)
        return Fairness(
            in_time={
                "requests": sum(met for _, met in self._of.values()) / requests,
                "classes": min(shares.values()),
                "bands": min([*bands, *shares.values()]),
            },
            classes=shares,
            mean_slowdown=sum(ordered) / requests,
            p99_slowdown=ordered[int(0.99 * (requests - 1))],
            longest_wait=self._longest,
            jain=sum(rates) ** 2 / (requests * sum(rate * rate for rate in rates)),
        )


def _in_time(record: RequestRecord) -> bool:
    return not record.error and record.meets_ttft and record.meets_tbt and record.meets_e2e


def run(scenario: Scenario, load: float) -> Fairness:
    """Runs the scenario to its end at a load."""
    tally = Tally()
    simulate(scenario.at_load(load), Watch(sink=tally.saw))
    return tally.fairness()


def groups_of(requests: Sequence[PlannedRequest]) -> dict[str, list[Places]]:
    """Returns by criterion the places of the requests of each group that must be in time."""
    classes: dict[str, list[int]] = defaultdict(list)
    bands: dict[tuple[str, int], list[int]] = defaultdict(list)
    for place, one in enumerate(requests):
        classes[one.slo.name].append(place)
        bands[one.slo.name, band(one.input_tokens)].append(place)
    least = max(LEAST_REQUESTS, LEAST_OF_ALL * len(requests))
    by_class = [np.array(places) for places in classes.values()]
    by_band = [np.array(places) for places in bands.values() if len(places) >= least]
    return {
        "requests": [np.arange(len(requests))],
        "classes": by_class,
        "bands": [*by_class, *by_band],
    }


class _Misses:
    """Counts the requests of a run that are not in time, and says which criteria are lost."""

    def __init__(self, groups: Mapping[str, Sequence[Places]]) -> None:
        self.lost: set[str] = set()
        self._left: list[tuple[str, int]] = []  # each group: its criterion, the misses it may have
        self._of: dict[int, list[int]] = defaultdict(list)  # each request: its groups
        for criterion, places in groups.items():
            for group in places:
                for place in group.tolist():
                    self._of[place].append(len(self._left))
                self._left.append((criterion, misses_allowed(len(group), GOAL)))

    def saw(self, record: RequestRecord) -> None:
        if _in_time(record):
            return
        for number in self._of[record.index]:
            criterion, left = self._left[number]
            self._left[number] = criterion, left - 1
            if not left:
                self.lost.add(criterion)


def _carried(
    scenario: Scenario, groups: Mapping[str, Sequence[Places]], wanted: str
) -> dict[str, bool]:
    """Runs a scenario until `wanted` is lost, or to its end.

    Returns what the run says about each criterion: of one that a run cut short has not lost,
    nothing.
    """
    misses = _Misses(groups)
    simulate(scenario, Watch(sink=misses.saw, stop=lambda: wanted in misses.lost))
    if wanted in misses.lost:
        return dict.fromkeys(misses.lost, False)
    return {criterion: criterion not in misses.lost for criterion in groups}


def goodputs(
    scenario: Scenario, start: float, near: Mapping[str, float] | None = None
) -> dict[str, float]:
    """Returns the largest load by each criterion; 0 where none is carried.

    start: a load of the grid. near: where the search of each criterion begins, any loads; without
    them at `start`, and then where the search before ended.
    """
    groups = groups_of(list(scenario.at_load(start).requests()))  # the same at every load
    seen: dict[int, dict[str, bool]] = defaultdict(dict)
    found = {}
    first = 0
    for criterion in CRITERIA:

        def carried(at: int, criterion: str = criterion) -> bool:
            known = seen[at]
            if criterion not in known:
                known |= _carried(scenario.at_load(start * STEP**at), groups, criterion)
            return known[criterion]

        if near and near[criterion]:
            first = round(math.log(near[criterion] / start, STEP))
        step = largest_step(carried, first)
        found[criterion] = 0.0 if step is None else start * STEP**step
        first = first if step is None else step
    return found


def largest_step(carried: Callable[[int], bool], first: int) -> int | None:
    """Returns a step that is carried, while the next `LOOK_AHEAD` are not; None when none is in
    reach.
    """
    low = high = None
    at, stride = first, 4
    while low is None or high is None:
        if carried(at):
            if at == REACH:
                return at
            low, at = at, min(at + stride, REACH)
        else:
            if at == -REACH:
                return None
            high, at = at, max(at - stride, -REACH)
        stride *= 2
    while high - low > 1:
        middle = (low + high) // 2
        if carried(middle):
            low = middle
        else:
            high = middle
    while True:
        ahead = [low + step for step in range(1, LOOK_AHEAD + 1) if carried(low + step)]
        if not ahead:
            return low
        low = ahead[-1]
