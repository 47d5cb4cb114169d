"""What the experiments of Tetris share: its testbeds, its systems, one point under load.

Section 7.1. The traces are synthetic: of the paper's only range and mean length are public (the
mixes tetris-short, -medium and -long). Arrivals are Poisson.

LoongServe itself, whose instances also decode, is not among the systems: LoongServe Disaggregated
is (the planner `esp`), which the paper finds marginally worse in TTFT.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Any

from millrace.core.config import SchedulerConfig
from millrace.core.improvement_rate import ImprovementRates, format_rates
from millrace.profiles import load_profile
from millrace.sim.report import Report
from millrace.sim.scenario import Scenario, Traffic, simulate
from millrace.sim.spec import SimSpec

TRACES = ("short", "medium", "long")

Told = Callable[[str], None]

#: Said with every result.
ASSUMPTIONS = (
    "synthetic: lengths by range and mean of the paper's traces, Poisson arrivals",
    "KV takes what 90 % of 80 GB a GPU leave beside the weights",
)

#: Curves are scaled to so many times the latency under light load (section 7.2).
LIMIT_X = 25.0

#: Of a GPU's 80 GB, what the engine may use.
_USABLE_BYTES = 0.9 * 80e9

#: Where `tetris-rates` put the best improvement rate of each arrival rate.
_RATES = "tetris_rates.json"


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

#: The paper's own system, and it without Algorithm 1's chunks (figure 13).
TETRIS, SINGLE_CHUNK = "Tetris", "Tetris, single chunk"
LOONGSERVE = "LoongServe Disaggregated"


def systems(testbed: Testbed, trace: str) -> dict[str, SchedulerConfig]:
    """Tetris first, then its baselines of section 7.1, in their settings for a trace."""
    dynamic = {"improvement_rate": -1.0, "improvement_rates": rates_setting(testbed, trace)}
    named: dict[str, dict[str, Any]] = {
        TETRIS: {"planner": "cdsp", **dynamic},
        SINGLE_CHUNK: {"planner": "single_chunk", **dynamic},
        LOONGSERVE: {"planner": "esp"},
    }
    named |= {f"Fixed SP {sp}": {"planner": "fixed_sp", "fixed_sp": sp} for sp in testbed.fixed_sp}
    return {name: scheduler(**fields) for name, fields in named.items()}


def scheduler(**fields: Any) -> SchedulerConfig:  # noqa: ANN401 - a setting's own type
    """Settings as all systems of the paper have them: planned at arrival, in order, no limits."""
    return SchedulerConfig(
        policy="fcfs",
        preemption="none",
        tasks_ahead=64,
        max_queue_requests=1_000_000,
        max_queue_s=1e9,
        request_timeout_s=1e9,
        release_timeout_s=1e9,
        **fields,
    )


def scenario(
    testbed: Testbed, trace: str, config: SchedulerConfig, *, requests: int, seed: int = 0
) -> Scenario:
    """A system on a testbed under a trace, at one request a second."""
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
    """One run: TTFT in seconds at an arrival rate."""

    rate_rps: float
    p50_s: float
    p99_s: float
    mean_s: float
    finished_rps: float
    mean_chunks: float

    @classmethod
    def of(cls, rate_rps: float, report: Report) -> Point:
        ttft_s = report.total.ttft_s
        return cls(
            rate_rps=rate_rps,
            p50_s=ttft_s.p50,
            p99_s=ttft_s.p99,
            mean_s=ttft_s.mean,
            finished_rps=report.request_rate_rps,
            mean_chunks=report.mean_chunks,
        )


def point(of: Scenario, rate_rps: float) -> Point:
    """Runs a scenario at an arrival rate."""
    return Point.of(rate_rps, simulate(of.at_load(rate_rps)))


def light_point(of: Scenario, testbed: Testbed, trace: str) -> Point:
    """The latency when hardly anyone else is there."""
    return point(of, testbed.steps_rps[trace] / 10)


def cases(quick: bool) -> Iterator[tuple[str, Testbed, str]]:
    """(testbed's key, testbed, trace): all of them, or the first for a quick look."""
    for key, testbed in TESTBEDS.items():
        for trace in TRACES:
            yield key, testbed, trace
            if quick:
                return


def rates_setting(testbed: Testbed, trace: str) -> str:
    """The shipped table of improvement rates, as the setting that holds it."""
    return format_rates(shipped_rates()[_key(testbed)][trace])


@cache
def shipped_rates() -> Mapping[str, Mapping[str, ImprovementRates]]:
    """Best improvement rates by testbed and trace."""
    document = json.loads(files(__package__).joinpath(_RATES).read_bytes())
    return {
        key: {
            trace: ImprovementRates(rows=tuple((a, r) for a, r in rows))
            for trace, rows in by_trace.items()
        }
        for key, by_trace in document["improvement_rates"].items()
    }


def _key(testbed: Testbed) -> str:
    return next(key for key, known in TESTBEDS.items() if known is testbed)
