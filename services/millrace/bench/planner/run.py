"""`millrace bench planner`: measures the cost of one CDSP plan, as in Tetris Table 2.

Random prompt lengths and queue times, 1,000 trials, a pool of as many instances as the largest SP
degree, eight per node. A trial is one call from Python: the queue times go in as an array, the plan
comes out as Python objects.

Two latency models: the shipped profile of Llama-3-8B on A100, whose degrees above 16 include the
cost of a long ring and are rarely worth it; and a model whose degrees all scale perfectly, where
large groups always pay and the search is largest.

Every trial runs several times. The first pass is reported as it is; another process that takes the
core adds milliseconds to a trial there, so its maximum says more about the machine. The median pass
takes each trial's median over the passes: the cost of the planner itself. Both run twice: with the
garbage collector frozen and off, as a server should have it while it plans, and on.
"""

from __future__ import annotations

import contextlib
import os
import platform
import random
import statistics
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from millrace.bench.common.collector import collector_off
from millrace.bench.planner.command import Settings
from millrace.core.config import SchedulerConfig
from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.scheduler.planning import PLANNERS, Planner, PlannerInputs
from millrace.core.scheduler.planning.plan import Plan
from millrace.profiles import load_profile

NODE_INSTANCES = 8
PROFILE = "llama3-8b-a100-tp1"
#: Tetris Table 2: largest SP degree -> microseconds (average, maximum).
PAPER_US = {
    8: (22.8, 52.5),
    16: (25.8, 86.8),
    32: (22.9, 53.4),
    64: (24.9, 45.1),
    128: (30.6, 73.7),
}
GOAL_US = (22.0, 86.0)

Trial = tuple[int, "array[float]"]


def trials_of(settings: Settings, instances: int) -> list[Trial]:
    """Returns the trials of one pool, equal for every model."""
    rng = random.Random(f"{settings.seed} {instances}")
    return [
        (
            rng.randint(*settings.tokens),
            array("d", [rng.uniform(0.0, settings.queue_s) for _ in range(instances)]),
        )
        for _ in range(settings.trials)
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Microseconds per call, and statistics of the plans. `gc`: off (and frozen) or on."""

    model: str
    max_sp: int
    gc: str
    avg_us: float
    max_us: float
    median_avg_us: float
    median_max_us: float
    mean_chunks: float
    mean_last_sp: float


def models() -> dict[str, SpLatency]:
    """Returns the latency models by name; both have the degrees 1 to 128."""
    scaling = {
        sp: Latency(a=0.03, b=5.6e-5 / sp, c=2.5e-9 / sp, d=1.25e-9 / sp)
        for sp in (2**k for k in range(8))
    }
    return {"a100": load_profile(PROFILE).prefill, "scaling": SpLatency(by_sp=scaling)}


def run(
    settings: Settings,
    *,
    on_progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Any]:
    """Measures every pool and model; the report is one JSON-ready document."""
    results: list[Result] = []
    total = 4 * len(settings.max_sp)
    for model, latency in models().items():
        for max_sp in settings.max_sp:
            planner = _planner(latency, max_sp, settings)
            trials = trials_of(settings, max_sp)
            for state, quiet in (("off", collector_off), ("on", contextlib.nullcontext)):
                on_progress(len(results), total, "planning")
                _one_pass(planner, trials)  # warms the caches up
                with quiet():
                    passes = [_one_pass(planner, trials) for _ in range(settings.passes)]
                plans = [planner.plan(*trial) for trial in trials]
                results.append(_result(model, max_sp, state, passes, plans))
    on_progress(total, total, "planning")
    return {
        "benchmark": "planner",
        "machine": {
            "cpus": os.cpu_count(),
            "architecture": platform.machine(),
            "python": platform.python_version(),
        },
        "settings": asdict(settings),
        "paper_us": {str(sp): figures for sp, figures in PAPER_US.items()},
        "goal_us": GOAL_US,
        "results": [asdict(result) for result in results],
    }


def _planner(latency: SpLatency, instances: int, settings: Settings) -> Planner:
    config = SchedulerConfig(planner="cdsp", improvement_rate=settings.improvement_rate)
    nodes = tuple(i // NODE_INSTANCES for i in range(instances))
    return PLANNERS["cdsp"](PlannerInputs(latency=latency, nodes=nodes, config=config))


def _one_pass(planner: Planner, trials: Sequence[Trial]) -> list[int]:
    """Returns nanoseconds of each trial's call."""
    clock, plan, took_ns = time.perf_counter_ns, planner.plan, []
    for tokens, queue_s in trials:
        started_ns = clock()
        plan(tokens, queue_s)
        took_ns.append(clock() - started_ns)
    return took_ns


def _result(
    model: str, max_sp: int, state: str, passes: list[list[int]], plans: list[Plan]
) -> Result:
    medians = [statistics.median(took) for took in zip(*passes, strict=True)]
    count = len(plans)
    return Result(
        model=model,
        max_sp=max_sp,
        gc=state,
        avg_us=sum(passes[0]) / count / 1e3,
        max_us=max(passes[0]) / 1e3,
        median_avg_us=sum(medians) / count / 1e3,
        median_max_us=max(medians) / 1e3,
        mean_chunks=sum(len(plan.chunks) for plan in plans) / count,
        mean_last_sp=sum(len(plan.chunks[-1].members) for plan in plans) / count,
    )
