"""`millrace bench scheduler`: measures what an event costs the scheduler under a very long queue.

The simulator runs the scheduler's core on a cluster where `waiting` requests wait all the time:
whenever fewer do, the next one arrives. `Machine.step` is timed for every event, and within it what
keeps the order: the policy's keys, and the moves in the queues. Times are of the CPU, so another
process on the machine does not count, and the garbage collector is off.

The queue is filled under `edf`, whose keys never change, which is quick. Then the policy changes,
and `settling` events pass before the measured ones. Requests are the mix `mixed`: chats of a
hundred tokens to books of a million, which run on groups. Objectives: `tight` are 1.5 times the
isolated prefill, so most requests that wait are late; `loose` are a thousand times as long, so all
could be in time; `half` has tight ones for every other request; `none` has none. With decode
instances of few pages, requests wait to be placed at decode instead of for prefill.
"""

from __future__ import annotations

import itertools
import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Any

from millrace.bench.common.collector import collector_off
from millrace.bench.common.report import Distribution
from millrace.bench.scheduler.command import OBJECTIVES, Settings
from millrace.core.config import SchedulerConfig
from millrace.core.scheduler import events
from millrace.core.scheduler.effects import Effect
from millrace.core.scheduler.fleet.pool import Pool
from millrace.core.scheduler.fleet.waiting_queue import WaitingQueue
from millrace.core.scheduler.machine import Machine
from millrace.core.scheduler.request_table import RequestTable
from millrace.profiles import load_profile
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.loop import Simulation
from millrace.sim.results.report import Collector
from millrace.sim.scenario import Scenario, Traffic
from millrace.sim.workload.workload import PlannedRequest, SloClass

PROFILE = "llama3-8b-a100-tp1"
#: Goal of the order, milliseconds of an event at p99.
GOAL_MS = 1.0
INSTANCES = 8  # of the cases that are not about their number
FILLING = "edf"
LOOSE = 1000.0
#: Seconds between arrivals while the queue is filled, and while it is full, times instances.
FILL_GAP_S = 1e-4
FULL_GAP_S = 0.05
MANY_TOKENS, FEW_TOKENS = 10**9, 2_000_000

#: What keeps the order. None of these calls another one of them.
ORDERING: tuple[tuple[type, str], ...] = (
    (Pool, "rerank"),
    (RequestTable, "rerank_unplaced"),
    (WaitingQueue, "add"),
    (WaitingQueue, "send"),
)


#: An event: its kind, nanoseconds of its step, and of the order in it.
Took = tuple[str, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is measured. `waits_for`: "prefill" or "decode"."""

    policy: str
    objectives: str
    prefill: int
    waits_for: str = "prefill"


def cases(settings: Settings) -> list[Case]:
    """Returns all cases: the default order in each, the other orders in one."""
    found = [
        Case(policy="millrace", objectives=objectives, prefill=prefill)
        for prefill in settings.prefill
        for objectives in OBJECTIVES
        if "millrace" in settings.policies
    ]
    for policy in settings.policies:
        found.append(Case(policy=policy, objectives="tight", prefill=INSTANCES))
        if policy == "millrace":
            found += [
                Case(policy=policy, objectives=kind, prefill=INSTANCES, waits_for="decode")
                for kind in ("tight", "loose")
            ]
    return list(dict.fromkeys(found))


class TimedMachine(Machine):
    """Notes the CPU time of each step, in nanoseconds, as soon as it is told to."""

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self.is_full = False
        self.took: list[Took] = []  # since then
        self.ordering_ns = 0

    def step(self, event: events.Event, now_s: float) -> list[Effect]:
        self.ordering_ns = 0
        started_ns = time.thread_time_ns()
        effects = super().step(event, now_s)
        took_ns = time.thread_time_ns() - started_ns
        if self.is_full:
            kind = type(event.report if isinstance(event, events.Reported) else event).__name__
            self.took.append((kind, took_ns, self.ordering_ns))
        return effects

    @contextmanager
    def ordering_timed(self) -> Iterator[None]:
        """Times `ORDERING` too: the core reads no clock, so its functions are wrapped."""
        originals = [(owner, name, getattr(owner, name)) for owner, name in ORDERING]
        for owner, name, function in originals:
            setattr(owner, name, self._timed(function))
        try:
            yield
        finally:
            for owner, name, function in originals:
                setattr(owner, name, function)

    def _timed(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def run(*given: Any) -> Any:  # noqa: ANN401 - as the function has them
            started_ns = time.thread_time_ns()
            found = function(*given)
            self.ordering_ns += time.thread_time_ns() - started_ns
            return found

        return run


class _Load:
    """Requests that come whenever fewer than `waiting` wait."""

    def __init__(self, case: Case, settings: Settings) -> None:
        self._case = case
        self._settings = settings
        config = SchedulerConfig(
            policy=FILLING,
            max_queue_requests=10 * settings.waiting,
            max_queue_s=1e12,
            request_timeout_s=1e12,
        )
        waits_for_prefill = case.waits_for == "prefill"
        self._spec = SimSpec(
            profile=load_profile(PROFILE),
            prefill=case.prefill,
            decode=max(case.prefill // 2, 1),
            decode_kv_tokens=MANY_TOKENS if waits_for_prefill else FEW_TOKENS,
            max_batch=10**6 if waits_for_prefill else 256,
            scheduler=config,
        )
        self.machine = TimedMachine(config)
        self._simulation = Simulation(
            self._spec,
            self._requests(),
            Collector(None),
            stop=lambda collector: self._is_over,
            machine=self.machine,
        )

    @property
    def _is_over(self) -> bool:
        return len(self.machine.took) >= self._settings.settling + self._settings.events

    def run(self) -> None:
        self._simulation.run()

    def _requests(self) -> Iterator[PlannedRequest]:
        """Yields requests at the times at which they are to come, as the queue is then."""
        settings, case, machine = self._settings, self._case, self.machine
        traffic = Traffic(
            mix="mixed",
            rate_rps=1.0,
            requests=10**9,
            slo_scale=LOOSE if case.objectives == "loose" else 1.0,
            seed=settings.seed,
        )
        without = {"half": 2, "none": 1}.get(case.objectives, 0)
        drawn = Scenario(spec=self._spec, traffic=traffic).requests()
        for row in itertools.takewhile(lambda row: not self._is_over, drawn):
            now_s = self._simulation.clock.now_s
            is_short = machine.queued < settings.waiting
            if not is_short and not machine.is_full:
                machine.is_full = True
                self._simulation.world.outbox.append(events.PolicyChanged(policy=case.policy))
            slo = row.slo
            if without and row.index % without == 0:
                slo = SloClass(name=slo.name)
            yield PlannedRequest(
                index=row.index,
                arrival_s=now_s + (FILL_GAP_S if is_short else FULL_GAP_S / case.prefill),
                input_tokens=row.input_tokens,
                output_tokens=row.output_tokens,
                slo=slo,
            )


def run(
    settings: Settings,
    *,
    on_progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Any]:
    """Measures every case; the report is one JSON-ready document."""
    wanted = cases(settings)
    results = []
    for number, case in enumerate(wanted):
        on_progress(number, len(wanted), f"{case.policy}, {case.prefill} instances")
        results.append(_measure(case, settings))
    on_progress(len(wanted), len(wanted), "measured")
    return {
        "benchmark": "scheduler",
        "machine": {
            "cpus": os.cpu_count(),
            "architecture": platform.machine(),
            "python": platform.python_version(),
        },
        "settings": asdict(settings),
        "goal_ms": GOAL_MS,
        "results": results,
    }


def _measure(case: Case, settings: Settings) -> dict[str, Any]:
    load = _Load(case, settings)
    with collector_off(), load.machine.ordering_timed():
        load.run()
    took = load.machine.took[settings.settling :]
    kinds = sorted({kind for kind, _, _ in took})
    return asdict(case) | {
        "all": _figures(took),
        "events": {kind: _figures([row for row in took if row[0] == kind]) for kind in kinds},
    }


def _figures(took: list[Took]) -> dict[str, Any]:
    """Returns the distributions over these events, in milliseconds."""
    return {
        "step_ms": asdict(Distribution.of_seconds(step_ns / 1e9 for _, step_ns, _ in took)),
        "order_ms": asdict(Distribution.of_seconds(order_ns / 1e9 for _, _, order_ns in took)),
    }
