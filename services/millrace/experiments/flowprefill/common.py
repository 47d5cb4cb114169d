"""FlowPrefill, section 6: its systems, models and workload, and attainment by load and objectives.

All its experiments share this module. The paper's 1P1D: one prefill and one decode instance, on
A100 for A800, which is the same GPU with slower NVLink; a model on one node hardly depends on that.

QwenTrace is not public any more, so requests are drawn by Table 1's moments with Poisson arrivals:
all results are synthetic. As in the paper, a rate changes the gaps and not the requests.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from types import MappingProxyType
from typing import Any, TypeVar

from millrace.core.config import SchedulerConfig
from millrace.core.cost.latency import SpLatency
from millrace.core.cost.operators import BatchShape
from millrace.core.cost.profile import Profile
from millrace.experiments import unlimited
from millrace.experiments.outcome import Announce
from millrace.profiles import load_profile
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.results.plots import Panel
from millrace.sim.results.report import Report, RequestRecord
from millrace.sim.scenario import Scenario, Traffic, Watch, simulate
from millrace.sim.studies.sweep import Axis, SweepOptions, SystemResult, sweep

S = TypeVar("S")
T = TypeVar("T")

#: The paper's models that there is a profile for; there is none for Qwen2.5-14B and Qwen3-30B-A3B.
MODELS: Mapping[str, str] = MappingProxyType(
    {"Llama-3-8B": "llama3-8b-a100-tp1", "Llama-3-70B": "llama3-70b-a100-tp4"}
)

#: Prompt lengths to which the paper's public code fits its TTFT predictor.
_PREDICTOR_TOKENS = (16, 32, 64, 128, 256, 512, 1024, *range(1536, 20481, 512))

#: The costs of a forward pass beyond its operators: by the profile, and by the seconds that the
#: paper's public code assumes for scheduling one chunk.
PASSES: Mapping[str, float | None] = MappingProxyType({"1 ms a pass": None, "10 ms a pass": 0.01})
PASSES_ASSUMPTION = "10 ms a pass: what the paper's public code puts down for scheduling a chunk"

#: Printed with every result.
ASSUMPTIONS = (
    "synthetic: lengths by Table 1's moments and Poisson arrivals stand for QwenTrace",
    "decode and its KV pool are large enough never to hold a prefill up",
    "latencies of the operator model alone, so that whole, chunked and batched passes agree",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """How prefill is scheduled. `chunk_tokens` of a forward pass, 0 for whole prompts.

    `pass_s`: seconds that a forward pass costs beyond its operators; None: by the profile.
    """

    policy: str
    preemption: str
    batch_tokens: int = 0
    chunk_tokens: int = 0
    tasks_ahead: int = 1  # 1: batches form as late as in the paper's Alg. 2
    kv_tokens: int = 400_000  # of the prefill instance: about what 80 GB a GPU hold beside weights
    pass_s: float | None = None

    def scheduler(self) -> SchedulerConfig:
        """Returns the settings.

        Nothing is refused or given up: all requests count, as in the paper.
        """
        return unlimited.scheduler(
            policy=self.policy,
            preemption=self.preemption,
            batch_tokens=self.batch_tokens,
            tasks_ahead=self.tasks_ahead,
        )


def by_rate(
    systems: Mapping[str, S],
    rates_rps: Iterable[float],
    announce: Announce,
    run: Callable[[S, float], T],
) -> dict[str, dict[float, T]]:
    """Runs every system at every rate. Returns the results by system and rate."""

    def one(name: str, rate_rps: float) -> T:
        announce(f"{name}, {rate_rps:g}/s")
        return run(systems[name], rate_rps)

    return {name: {rate: one(name, rate) for rate in rates_rps} for name in systems}


DISTSERVE = System(policy="fcfs", preemption="none")
CP2K = System(policy="edf", preemption="chunk", chunk_tokens=2048)
CP8K = System(policy="edf", preemption="chunk", chunk_tokens=8192)
FLOWPREFILL = System(policy="s_edf", preemption="operator", batch_tokens=2048)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is simulated: requests per run, runs with different draws, points of the curves."""

    requests: int = 2000
    seeds: int = 2
    tolerance: float = 0.03
    curves: bool = True


FULL = Size()
QUICK = Size(requests=300, seeds=1, tolerance=0.04, curves=False)


def size_of(quick: bool) -> Size:
    return QUICK if quick else FULL


@lru_cache
def operator_profile(name: str, pass_s: float | None = None) -> Profile:
    """A shipped profile whose whole prompts take the time of its operator model, as parts do.

    The shipped profile follows Tetris's Table 1, which starts at 4k tokens: below, its fit adds 30
    ms to every prompt that batches and chunks, summed from operators, don't have. Short prompts are
    three quarters of this workload. The latency model is fitted as the paper's predictor is: to
    passes alone at the lengths of its public code.
    """
    profile = load_profile(name)
    operators = profile.operators
    if pass_s is not None:
        operators = replace(operators, overhead_s=pass_s)
    points = tuple(
        (tokens, operators.pass_s(BatchShape(prefills=((tokens, 0),))))
        for tokens in _PREDICTOR_TOKENS
    )
    one = replace(profile.prefill.by_sp[1], points=points)
    return replace(
        profile, operators=operators, prefill=SpLatency(by_sp=MappingProxyType({1: one}))
    )


def scenario(
    system: System, model: str, rate_rps: float, size: Size, *, mix: str = "qwen", seed: int = 0
) -> Scenario:
    """Returns one prefill and one decode instance of `model` (see `MODELS`) under `system`."""
    spec = SimSpec(
        profile=operator_profile(MODELS[model], system.pass_s),
        prefill=1,
        decode=1,
        max_chunk_tokens=system.chunk_tokens,
        prefill_kv_tokens=system.kv_tokens,
        decode_kv_tokens=100_000_000,
        max_batch=100_000,
        scheduler=system.scheduler(),
    )
    traffic = Traffic(mix=mix, rate_rps=rate_rps, requests=size.requests, seed=seed)
    return Scenario(spec=spec, traffic=traffic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The results of one run without decode, which continues after the last first token.

    `requests_per_s` is the throughput of prefill, from time 0 to the last first token.
    """

    attainment: float
    requests_per_s: float
    passes_per_request: float

    def to_json(self) -> dict[str, float]:
        return asdict(self)


def load(of: Scenario) -> Load:
    """Simulates a scenario."""
    last_s = 0.0

    def sink(record: RequestRecord) -> None:
        nonlocal last_s
        last_s = max(last_s, record.arrival_s + record.ttft_s)

    report = simulate(of, Watch(sink=sink))
    assert report.engine is not None  # a run has counters
    return Load(
        attainment=report.total.attainment,
        requests_per_s=report.requests / last_s,
        passes_per_request=report.engine.chunks / report.requests,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """The load at which a system stops reaching 90 %: median over the draws, each draw, its
    classes.

    `classes` holds attainment by class at the first draw's edge.
    """

    median: float
    by_seed: tuple[float, ...]
    classes: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Systems on one axis: their edges, and reports of the first draw at points of the axis."""

    axis: Axis
    edges: Mapping[str, Edge]
    curves: Mapping[str, Sequence[tuple[float, Report]]]

    def ratio(self, system: str, other: str) -> float:
        """How many times better `system` does than `other`: more load, or tighter objectives."""
        ours, theirs = self.edges[system].median, self.edges[other].median
        return ours / theirs if self.axis == "rate" else theirs / ours

    def to_json(self) -> dict[str, Any]:
        return {
            "edge": {
                name: {"median": e.median, "by_seed": e.by_seed, "classes": dict(e.classes)}
                for name, e in self.edges.items()
            },
            "attainment": {
                name: [[x, report.total.attainment] for x, report in curve]
                for name, curve in self.curves.items()
            },
        }

    def panel(self, title: str) -> Panel:
        """A chart of attainment over the axis, with upright edges, as in the paper's figure 9."""
        by_rate = self.axis == "rate"
        return Panel(
            title,
            "request rate (1/s)" if by_rate else "SLO scale",
            "TTFT attainment (%)",
            {
                name: [(x, 100 * report.total.attainment) for x, report in curve]
                for name, curve in self.curves.items()
            },
            mark=90.0,
            edges={name: edge.median for name, edge in self.edges.items()},
        )


def compare(
    systems: Mapping[str, System],
    model: str,
    axis: Axis,
    rate_rps: float,
    size: Size,
    announce: Announce,
    *,
    points: Iterable[float] = (),
    mix: str = "qwen",
) -> Comparison:
    """Searches every system's edge on every draw, and runs the first draw at `points`.

    `rate_rps` is where the search begins, or the fixed rate of the SLO axis.
    """
    found: dict[str, list[SystemResult]] = {name: [] for name in systems}
    for seed in range(size.seeds):
        options = SweepOptions(
            axis=axis,
            start=rate_rps if axis == "rate" else 1.0,
            tolerance=size.tolerance,
            points=tuple(points) if size.curves and not seed else (),
            jobs=1,
        )
        scenarios = {
            name: scenario(system, model, rate_rps, size, mix=mix, seed=seed)
            for name, system in systems.items()
        }

        def on_run(name: str, value: float, draw: int = seed) -> None:
            announce(f"{model}, draw {draw}, {name}: {axis} {value:.3g}")

        for result in sweep(scenarios, options, on_run):
            found[result.name].append(result)
    return Comparison(
        axis=axis,
        edges={name: _edge(results) for name, results in found.items()},
        curves={name: results[0].curve for name, results in found.items()},
    )


def _edge(results: Sequence[SystemResult]) -> Edge:
    values = [result.edge for result in results if result.edge is not None]
    first = results[0].at_edge
    assert first is not None and len(values) == len(results)  # some load is always carried
    return Edge(
        median=statistics.median(values),
        by_seed=tuple(values),
        classes={name: one.attainment for name, one in first.classes.items()},
    )
