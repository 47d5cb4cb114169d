"""Finds the goodput of one system on one draw: the highest rate tried with 90 % in time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from operator import attrgetter

from millrace.bench.hol.traffic import Attainment
from millrace.sim.studies.search import largest_load

#: Whether a run reached the goal.
Goal = Callable[[Attainment], bool]
CARRIED: Goal = attrgetter("carried")
CARRIED_BY_CLASS: Goal = attrgetter("carried_by_class")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodput:
    """The result of a search. `rate_rps` 0: no rate reached the goal.

    `failed_rps`: the lowest rate above `rate_rps` that missed the goal; None when the search ended
    before it found such a rate. `runs` ascend by rate.
    """

    rate_rps: float
    failed_rps: float | None
    runs: tuple[Attainment, ...]

    @property
    def at_edge(self) -> Attainment | None:
        """Returns the run at the goodput."""
        return next((run for run in self.runs if run.rate_rps == self.rate_rps), None)


async def goodput(
    run: Callable[[float], Awaitable[Attainment]],
    start_rps: float,
    *,
    tolerance: float,
    step: float,
    most_runs: int,
    goal: Goal = CARRIED,
) -> Goodput:
    """Tries rates from `start_rps` on (see `largest_load`), `most_runs` at most."""
    loads = largest_load(start_rps, tolerance, step)
    runs: list[Attainment] = []
    rate = next(loads)
    while len(runs) < most_runs:
        runs.append(await run(rate))
        try:
            rate = loads.send(goal(runs[-1]))
        except StopIteration:
            break
    return found(runs, goal)


def found(runs: list[Attainment], goal: Goal = CARRIED) -> Goodput:
    """Returns the goodput from runs at several rates."""
    best = max((run.rate_rps for run in runs if goal(run)), default=0.0)
    above = [run.rate_rps for run in runs if not goal(run) and run.rate_rps > best]
    return Goodput(
        rate_rps=best,
        failed_rps=min(above, default=None),
        runs=tuple(sorted(runs, key=lambda run: run.rate_rps)),
    )
