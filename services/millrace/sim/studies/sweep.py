"""Many runs: the largest rate or the tightest objectives that a system carries, and curves.

FlowPrefill's goodput (section 6.1) is the largest request rate at 90 % attainment. Its other axis
is the SLO scale, all objectives times one factor, with the smallest scale that still reaches 90 %
as the result. Both are searched by bisection, with runs in several processes. A run is stopped once
it must fail. The result does not depend on the number of processes.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import asdict, dataclass
from typing import Any, Literal

from millrace.sim.results.report import Report
from millrace.sim.scenario import Scenario, Watch, misses_allowed, simulate
from millrace.sim.studies.search import largest_load

Axis = Literal["rate", "slo-scale"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepOptions:
    """The goal of a search. `points` are extra values of the axis, each run to its end.

    `start` is where the search begins; `tolerance` how far, as a share, it may end from the edge.
    """

    axis: Axis = "rate"
    search: bool = True
    start: float = 1.0
    tolerance: float = 0.02
    goal: float = 0.9
    points: tuple[float, ...] = ()
    jobs: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a search: the value of the axis, and whether the goal was reached there."""

    value: float
    carried: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemResult:
    """The result of a sweep for one system.

    `edge` is the largest rate (or rate scale of a replayed trace), or the smallest SLO scale, that
    reaches the goal; None when there is none, or when the sweep searched none. `at_edge` is the run
    there.
    """

    name: str
    edge: float | None
    at_edge: Report | None
    trials: tuple[Trial, ...]
    curve: tuple[tuple[float, Report], ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def sweep(
    systems: Mapping[str, Scenario],
    options: SweepOptions,
    on_run: Callable[[str, float], None] | None = None,
) -> list[SystemResult]:
    """Runs all systems; `on_run(system, value)` is called after each run. Results in their order.

    With one job everything runs in this process. Raises ConfigError as the runs do.
    """
    tasks: list[_Task] = []
    for name, scenario in systems.items():
        if options.search:
            tasks.append(_Task(name, _search(scenario, options)))
        tasks += [_Task(name, _point(scenario, options.axis, value)) for value in options.points]
    announce = on_run or (lambda name, value: None)
    if options.jobs == 1:
        for task in tasks:
            while task.next is not None:
                value = task.next.value
                task.take(_run(task.next))
                announce(task.system, value)
    else:
        _in_processes(tasks, options.jobs, announce)
    return [_result(name, tasks) for name in systems]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """One simulation to be done. `goal` stops it early, as in `Watch`."""

    scenario: Scenario
    value: float
    goal: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    edge: float | None = None
    at_edge: Report | None = None
    trials: tuple[Trial, ...] = ()
    point: tuple[float, Report] | None = None


_Steps = Generator[_Run, Report, _Found]


class _Task:
    """Runs to be made one after another: `next`, until there is none and `found` is set."""

    def __init__(self, system: str, steps: _Steps) -> None:
        self.system = system
        self.next: _Run | None = next(steps)
        self.found = _Found()
        self._steps = steps

    def take(self, report: Report) -> None:
        try:
            self.next = self._steps.send(report)
        except StopIteration as end:
            self.next, self.found = None, end.value


def _run(run: _Run) -> Report:
    return simulate(run.scenario, Watch(goal=run.goal))


def _placed(scenario: Scenario, axis: Axis, value: float) -> Scenario:
    return scenario.at_load(value) if axis == "rate" else scenario.at_slo_scale(value)


def _point(scenario: Scenario, axis: Axis, value: float) -> _Steps:
    report = yield _Run(scenario=_placed(scenario, axis, value), value=value, goal=None)
    return _Found(point=(value, report))


def _search(scenario: Scenario, options: SweepOptions) -> _Steps:
    """Searches the largest load; on the SLO axis load is one over the scale."""
    by_scale = options.axis == "slo-scale"
    loads = largest_load(1 / options.start if by_scale else options.start, options.tolerance)
    count = scenario.traffic.count()
    needed = count - misses_allowed(count, options.goal)
    reports: dict[float, Report] = {}
    trials: list[Trial] = []
    load = next(loads)
    while True:
        value = 1 / load if by_scale else load
        report = yield _Run(
            scenario=_placed(scenario, options.axis, value), value=value, goal=options.goal
        )
        carried = report.total.attained >= needed
        trials.append(Trial(value=value, carried=carried))
        reports[load] = report
        try:
            load = loads.send(carried)
        except StopIteration as end:
            edge: float | None = end.value
            break
    if edge is None:
        return _Found(trials=tuple(trials))
    return _Found(edge=1 / edge if by_scale else edge, at_edge=reports[edge], trials=tuple(trials))


def _in_processes(
    tasks: Sequence[_Task], jobs: int, announce: Callable[[str, float], None]
) -> None:
    """Keeps `jobs` processes busy. A new interpreter each: threads here must not be forked."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=jobs, mp_context=context) as pool:
        running: dict[Future[Report], _Task] = {
            pool.submit(_run, task.next): task for task in tasks if task.next is not None
        }
        try:
            while running:
                for done in wait(running, return_when=FIRST_COMPLETED).done:
                    task = running.pop(done)
                    value = 0.0 if task.next is None else task.next.value
                    task.take(done.result())
                    announce(task.system, value)
                    if task.next is not None:
                        running[pool.submit(_run, task.next)] = task
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def _result(name: str, tasks: Sequence[_Task]) -> SystemResult:
    found = [task.found for task in tasks if task.system == name]
    search = next((one for one in found if one.point is None), _Found())
    points = [one.point for one in found if one.point is not None]
    return SystemResult(
        name=name,
        edge=search.edge,
        at_edge=search.at_edge,
        trials=search.trials,
        curve=tuple(sorted(points, key=lambda point: point[0])),
    )
