"""Medha, sections 6.1 and 6.2: its systems, its mixed workload, and an hour of it.

Shared by its experiments. 16 A100s serve Llama-3-8B. Short requests are ShareGPT's, long requests
128k to 1M tokens (the mix medha-mix: MEDHA-SWE is not public, so long requests are synthetic). A
run is one hour, the paper's profiling window: a request that has not ended by then counts as never
ended.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import takewhile
from pathlib import Path
from types import MappingProxyType
from typing import Any

from millrace.core.config import SchedulerConfig
from millrace.core.cost.latency import SpLatency
from millrace.core.cost.profile import Profile
from millrace.core.instance.packing import PackingConfig
from millrace.experiments import unlimited
from millrace.profiles import load_profile
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.loop import Simulation
from millrace.sim.results.plots import Panel
from millrace.sim.results.report import Collector, RequestRecord
from millrace.sim.scenario import Scenario, Traffic
from millrace.sim.workload.mixes import LONG_FRACTION

HOUR_S = 3600.0
_LAST_S = 60.0  # of a window: requests that arrive in it are served, and not measured

#: Tokens that no experiment comes near: these experiments do not study KV memory.
_AMPLE_TOKENS = 50_000_000

#: Printed with every result.
ASSUMPTIONS = (
    "synthetic: prompts of 128k to 1M tokens are log-uniform, for MEDHA-SWE is not public",
    "KV memory is ample; outputs are those of ShareGPT and of MEDHA-SWE's P50 and P90",
)


def scheduler(policy: str, **fields: Any) -> SchedulerConfig:  # noqa: ANN401 - a setting's own type
    """Returns the settings. Nothing is refused or given up: all requests count."""
    return unlimited.scheduler(
        policy=policy, preemption="none", batch_tokens=0, tasks_ahead=64, **fields
    )


def chunked(policy: str, packing: PackingConfig) -> SimSpec:
    """TP8 and two pipeline stages on two servers, prefill and decode in the same batches."""
    return SimSpec(
        profile=load_profile("llama3-8b-a100-tp8"),
        mixed=1,
        spp=2,
        decode_kv_tokens=_AMPLE_TOKENS,
        max_batch=100_000,
        packing=packing,
        scheduler=scheduler(policy),
    )


def medha(policy: str = "lars", **packing: Any) -> SimSpec:  # noqa: ANN401
    """Medha, its batches held to 50 ms: the default of the public code."""
    return chunked(policy, PackingConfig(**({"t_target_s": 0.05, "max_batch": 10_000} | packing)))


def sarathi(chunk_tokens: int) -> SimSpec:
    """Chunks of a fixed size in order of arrival, on Medha's pipeline.

    That favours Sarathi: with plain PP a long prompt's chunks would not follow each other densely.
    """
    packing = PackingConfig(
        t_target_s=0.05, max_batch=10_000, adaptive=False, fixed_chunk_tokens=chunk_tokens
    )
    return chunked("fcfs", packing)


def loongserve(instances: int = 8) -> SimSpec:
    """TP2 instances in groups of up to 4 (TP-2, CP-4), whole prompts, planned as they arrive.

    TP2 x CP k is timed as Table 1 of Tetris times SP 2k of TP1: the same GPUs, measured with
    LoongServe's own kind of attention. Decode has eight GPUs of its own, not counted, so that the
    system is not limited by a split that LoongServe would have adapted.
    """
    return SimSpec(
        profile=_pairs(load_profile("llama3-8b-a100-tp1")),
        decode_profile=load_profile("llama3-8b-a100-tp8"),
        prefill=instances,
        decode=1,
        prefill_kv_tokens=_AMPLE_TOKENS,
        decode_kv_tokens=_AMPLE_TOKENS,
        max_batch=100_000,
        scheduler=scheduler("fcfs", planner="esp"),
    )


def _pairs(profile: Profile) -> Profile:
    """Two GPUs as one instance, alone or in groups of 2 and 4."""
    by_sp = {degree: profile.prefill.by_sp[2 * degree] for degree in (1, 2, 4)}
    return replace(profile, tp=2, prefill=SpLatency(by_sp=MappingProxyType(by_sp)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests. `trace`: a file of the short requests' lengths, else the shipped quantiles."""

    qps: float
    long_fraction: float = LONG_FRACTION
    window_s: float = HOUR_S
    trace: Path | None = None
    seed: int = 0

    def scenario(self, spec: SimSpec) -> Scenario:
        traffic = Traffic(
            trace=self.trace,
            mix="medha-mix",
            rate_rps=self.qps,
            long_fraction=self.long_fraction,
            requests=math.ceil(2 * self.qps * self.window_s) + 100,
            seed=self.seed,
        )
        return Scenario(spec=spec, traffic=traffic)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """Quantiles in seconds over all requests of a kind, None where a request never ended."""

    requests: int
    ended: int
    p50_s: float | None
    p90_s: float | None
    p99_s: float | None

    @classmethod
    def of(cls, values: Sequence[float], ended: int) -> Spread:
        """Computes the quantiles of `values` in seconds, inf for requests that have not ended."""
        ordered = sorted(values)

        def at(share: float) -> float | None:
            if not ordered:
                return None
            value = ordered[min(math.ceil(share * len(ordered)), len(ordered)) - 1]
            return None if math.isinf(value) else value

        return cls(requests=len(values), ended=ended, p50_s=at(0.5), p90_s=at(0.9), p99_s=at(0.99))


@dataclass(frozen=True, slots=True, kw_only=True)
class Hour:
    """One window of one system. TBT is a request's mean gap, of requests that ended.

    `ttft_cdf_s`: every twentieth quantile of TTFT over all requests, None from the first request
    without a first token.
    """

    short: Spread
    long: Spread
    total: Spread
    tbt_p50_s: float | None
    tbt_p99_s: float | None
    prefill_tokens_s: float  # of requests that ended, a second of the window
    ttft_cdf_s: tuple[float | None, ...]

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def run_hour(spec: SimSpec, load: Load) -> Hour:
    """Runs a window and stops: an overloaded system would run on for too long."""
    records: dict[int, RequestRecord] = {}
    last_s = 0.0

    def sink(record: RequestRecord) -> None:
        nonlocal last_s
        last_s = record.arrival_s + record.e2e_s
        records[record.index] = record

    planned = list(takewhile(lambda r: r.arrival_s < load.window_s, load.scenario(spec).requests()))
    Simulation(spec, iter(planned), Collector(sink), stop=lambda _: last_s > load.window_s).run()
    measured = [r for r in planned if r.arrival_s < load.window_s - _LAST_S]
    ended = {r.index for r in measured if r.index in records}

    def spread(name: str) -> Spread:
        own = [r.index for r in measured if name in ("", r.slo.name)]
        values = [records[i].ttft_s if i in ended else math.inf for i in own]
        return Spread.of(values, sum(i in ended for i in own))

    gaps_s = [gap_s for i in ended if (gap_s := records[i].tbt_s) is not None]
    gap = Spread.of(gaps_s, len(gaps_s))
    ttfts_s = sorted(records[r.index].ttft_s if r.index in ended else math.inf for r in measured)
    return Hour(
        short=spread("short"),
        long=spread("long"),
        total=spread(""),
        tbt_p50_s=gap.p50_s,
        tbt_p99_s=gap.p99_s,
        prefill_tokens_s=sum(records[i].input_tokens for i in ended) / load.window_s,
        ttft_cdf_s=tuple(
            None if math.isinf(value) else value
            for value in (ttfts_s[(len(ttfts_s) - 1) * k // 20] for k in range(21))
        ),
    )


def ratio(theirs: float | None, ours: float | None) -> str:
    """Returns how many times longer theirs takes, as text."""
    if ours is None:
        return "-"
    return "never" if theirs is None else f"{theirs / ours:.1f}"


def cdf_panel(found: Mapping[str, Sequence[tuple[float, Hour]]], rate: float, title: str) -> Panel:
    """Charts TTFT's CDF by system at one rate; a curve ends where requests got no first token."""
    return Panel(
        title,
        "TTFT (s)",
        "requests (%)",
        {
            name: [
                (ttft_s, 5.0 * step)
                for step, ttft_s in enumerate(dict(hours)[rate].ttft_cdf_s)
                if ttft_s is not None
            ]
            for name, hours in found.items()
        },
        log_x=True,
    )
