"""Shared by the experiments of Tetris: its testbeds, its systems, one point under load.

Section 7.1. The traces are synthetic: only range and mean length of the paper's traces are public
(the mixes tetris-short, -medium and -long). Arrivals are Poisson.

LoongServe itself, whose instances also decode, is not among the systems: LoongServe Disaggregated
is (the planner `esp`), which the paper finds marginally worse in TTFT.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import islice
from types import MappingProxyType
from typing import Any

from millrace.core.config import SchedulerConfig
from millrace.core.cost.rates import ImprovementRates, format_rates
from millrace.experiments import unlimited
from millrace.profiles import load_profile
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.results.report import Report
from millrace.sim.scenario import Scenario, Traffic, simulate

TRACES = ("short", "medium", "long")

#: Printed with every result.
ASSUMPTIONS = (
    "synthetic: lengths by range and mean of the paper's traces, Poisson arrivals",
    "KV takes what 90 % of 80 GB a GPU leave beside the weights",
)

#: Curves are scaled to this many times the latency under light load (section 7.2).
LIMIT_X = 25.0

#: The part of a GPU's 80 GB that the engine may use.
_USABLE_BYTES = 0.9 * 80e9

#: Where `tetris-rates` put the best improvement rate of each arrival rate.
_RATES = "rates.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Testbed:
    """A cluster of section 7.1: half of its nodes prefill, half decode.

    `steps_rps`: by trace, between the arrival rates of a curve. `fixed_sp`: degrees that fit.
    """

    name: str
    prefill_profile: str
    decode_profile: str
    prefill: int
    decode: int
    weight_bytes: float
    steps_rps: Mapping[str, float]
    fixed_sp: tuple[int, ...]


TESTBEDS: Mapping[str, Testbed] = MappingProxyType(
    {
        "8b": Testbed(
            name="Llama-3-8B",
            prefill_profile="llama3-8b-a100-tp1",
            decode_profile="llama3-8b-a100-tp8",
            prefill=16,
            decode=2,
            weight_bytes=16.1e9,
            steps_rps={"short": 0.5, "medium": 0.5, "long": 0.25},
            fixed_sp=(8, 16),
        ),
        "70b": Testbed(
            name="Llama-3-70B",
            prefill_profile="llama3-70b-a100-tp4",
            decode_profile="llama3-70b-a100-tp4",
            prefill=8,
            decode=8,
            weight_bytes=141e9,
            steps_rps={"short": 0.2, "medium": 0.2, "long": 0.1},
            fixed_sp=(8,),
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """How much is simulated: arrivals of `duration_s` per run, but at least `least` requests; every
    `stride`-th of the arrival rates; a search for an edge ends within `tolerance`, as a share.

    A time, not a count: above a system's long-run capacity its queue grows as long as requests
    come, so that equally many requests at a higher rate would be a milder test.
    """

    duration_s: float = 600.0
    least: int = 200
    stride: int = 1
    tolerance: float = 0.02


FULL = Size()
QUICK = Size(duration_s=10.0, least=40, stride=8, tolerance=0.5)

#: The paper's own system, and the same without Algorithm 1's chunks (figure 13).
TETRIS, SINGLE_CHUNK = "Tetris", "Tetris, single chunk"
LOONGSERVE = "LoongServe Disaggregated"


def systems(testbed: Testbed, trace: str) -> dict[str, SchedulerConfig]:
    """Returns Tetris, then its baselines of section 7.1, in their settings for a trace."""
    dynamic = {"improvement_rate": -1.0, "improvement_rates": rates_setting(testbed, trace)}
    named: dict[str, dict[str, Any]] = {
        TETRIS: {"planner": "cdsp", **dynamic},
        SINGLE_CHUNK: {"planner": "single_chunk", **dynamic},
        LOONGSERVE: {"planner": "esp"},
    }
    named |= {f"Fixed SP {sp}": {"planner": "fixed_sp", "fixed_sp": sp} for sp in testbed.fixed_sp}
    return {name: scheduler(**fields) for name, fields in named.items()}


def scheduler(**fields: Any) -> SchedulerConfig:  # noqa: ANN401 - a setting's own type
    """Returns settings for all systems as in the paper: planned at arrival, in order, no limits."""
    return unlimited.scheduler(
        policy="fcfs", preemption="none", batch_tokens=0, tasks_ahead=64, **fields
    )


def scenario(
    testbed: Testbed, trace: str, config: SchedulerConfig, *, requests: int = 1, seed: int = 0
) -> Scenario:
    """Returns a system on a testbed under a trace, at one request per second."""
    prefill = load_profile(testbed.prefill_profile)
    decode = load_profile(testbed.decode_profile)

    def kv_tokens(tp: int) -> int:
        return int((_USABLE_BYTES * tp - testbed.weight_bytes) / prefill.kv_bytes_per_token)

    return Scenario(
        spec=SimSpec(
            profile=prefill,
            decode_profile=decode,
            prefill=testbed.prefill,
            decode=testbed.decode,
            scheduler=config,
            prefill_kv_tokens=kv_tokens(prefill.tp),
            decode_kv_tokens=kv_tokens(decode.tp),
            seed=seed,
        ),
        traffic=Traffic(mix=f"tetris-{trace}", rate_rps=1.0, requests=requests, seed=seed),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One run: TTFT in seconds at an arrival rate.

    `busy` is the share of time that prefill instances compute, from first arrival to last answer.
    """

    rate_rps: float
    p50_s: float
    p99_s: float
    mean_s: float
    finished_rps: float
    mean_chunks: float
    busy: float

    @classmethod
    def of(cls, rate_rps: float, report: Report) -> Point:
        ttft_s, engine = report.total.ttft_s, report.engine
        assert engine is not None  # a simulation always has it
        return cls(
            rate_rps=rate_rps,
            p50_s=ttft_s.p50,
            p99_s=ttft_s.p99,
            mean_s=ttft_s.mean,
            finished_rps=report.request_rate_rps,
            mean_chunks=report.mean_chunks,
            busy=engine.busy_share["prefill"],
        )


def loaded(of: Scenario, rate_rps: float, size: Size) -> Scenario:
    """Returns a scenario at an arrival rate."""
    requests = max(size.least, math.ceil(rate_rps * size.duration_s))
    return replace(of, traffic=replace(of.traffic, requests=requests)).at_load(rate_rps)


def point(of: Scenario, rate_rps: float, size: Size) -> Point:
    """Runs a scenario at an arrival rate."""
    return Point.of(rate_rps, simulate(loaded(of, rate_rps, size)))


def cases(quick: bool) -> Iterator[tuple[str, Testbed, str]]:
    """Returns (testbed's key, testbed, trace): all of them, or the first alone for a quick run."""
    every = ((key, bed, trace) for key, bed in TESTBEDS.items() for trace in TRACES)
    return islice(every, 1) if quick else every


def rates_setting(testbed: Testbed, trace: str) -> str:
    """Returns the shipped table of improvement rates, as a setting."""
    return format_rates(shipped_rates()[_key(testbed)][trace])


@cache
def shipped_rates() -> Mapping[str, Mapping[str, ImprovementRates]]:
    """Returns the best improvement rates by testbed and trace."""
    document = json.loads(files(__package__).joinpath(_RATES).read_bytes())
    return {
        key: {
            trace: ImprovementRates(rows=tuple((a, r) for a, r in rows))
            for trace, rows in by_trace.items()
        }
        for key, by_trace in document["results"]["improvement_rates"].items()
    }


def _key(testbed: Testbed) -> str:
    return next(key for key, known in TESTBEDS.items() if known is testbed)
