"""Compares CDSP with fixed and single-chunk groups under load: live through the stack, and
simulated.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from millrace.bench.common.load_test import ServeOptions, run
from millrace.bench.common.options import Announce
from millrace.core.config import load_config
from millrace.core.cost.profile import Profile
from millrace.core.errors import MillraceError
from millrace.local.options import StackOptions
from millrace.local.stack import Stack
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.loop import Simulation
from millrace.sim.results.report import Collector, RequestRecord
from millrace.sim.workload.traces import TraceRow
from millrace.sim.workload.workload import (
    PlannedRequest,
    WorkloadOptions,
    lognormal,
    plan,
)

CDSP = "cdsp"
PLANNERS = (CDSP, "single_chunk", "fixed_sp")
LONG_SHARE = 0.2

_ALONE = 6  # short prompts alone, to measure the TTFT beyond prefill


@dataclass(frozen=True, slots=True, kw_only=True)
class Mix:
    """Short prompts, lognormal, and a share of long prompts, uniform from half of `long_tokens` to
    it.

    Each request asks for one token: decode shares the cores here and is not measured.
    """

    short_tokens: int
    long_tokens: int
    requests: int
    seed: int

    def at(self, rate_rps: float) -> WorkloadOptions:
        """Returns the same requests at any rate, with scaled gaps."""
        short = lognormal(self.short_tokens, self.short_tokens / 2)

        def draw(rng: random.Random) -> TraceRow:
            is_long = rng.random() < LONG_SHARE
            tokens = rng.randint(self.long_tokens // 2, self.long_tokens) if is_long else short(rng)
            name = "long" if is_long else "short"
            return TraceRow(
                arrival_s=None,
                input_tokens=min(tokens, self.long_tokens),
                output_tokens=1,
                class_name=name,
            )

        return WorkloadOptions(
            draw_row=draw, rate_rps=rate_rps, requests=self.requests, seed=self.seed
        )

    def capacity_rps(self, profile: Profile, instances: int) -> float:
        """Returns the requests/s that the instances can compute, each alone and all the time."""
        requests = list(plan(self.at(1.0)))
        work_s = fmean(profile.prefill.chunk_s(r.input_tokens) for r in requests)
        return instances / work_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The inputs of every stack of a run. `settings` (`section.field=value`) hold for all
    stacks.
    """

    model: str
    profile_path: Path
    instances: int
    threads: int
    token_ids: tuple[int, int] | None
    settings: Sequence[str]

    def with_planner(self, planner: str) -> list[str]:
        """Returns settings as in Tetris: first come first served, without preemption."""
        return [
            *self.settings,
            f"scheduler.planner={planner}",
            f"scheduler.fixed_sp={self.instances}",
            "scheduler.policy=fcfs",
            "scheduler.preemption=none",
        ]


def figures(ttft_s: Sequence[float]) -> dict[str, float]:
    """Returns mean, median and percentiles in seconds."""
    ascending = sorted(ttft_s)
    return {
        "mean_s": fmean(ascending),
        "p50_s": median(ascending),
        "p99_s": ascending[math.ceil(0.99 * len(ascending)) - 1],
    }


async def live(
    planner: str, served: Served, mix: Mix, rates_rps: Sequence[float], announce: Announce
) -> dict[str, Any]:
    """Returns TTFTs at every rate on a stack of its own, and the median of a short prompt alone on
    it.
    """
    announce(f"{planner}: starting the stack")
    options = StackOptions(
        model=served.model,
        prefill=served.instances,
        decode=1,
        port=0,
        threads=served.threads,
        settings=[f"engine.profile={served.profile_path}", *served.with_planner(planner)],
    )
    async with Stack(options) as stack:
        short = WorkloadOptions(
            trace=[TraceRow(arrival_s=None, input_tokens=mix.short_tokens, output_tokens=1)],
            open_arrivals=True,
            requests=_ALONE,
        )
        alone_s = await _send(stack.url, served, short, concurrency=1)
        runs = []
        for rate_rps in rates_rps:
            announce(f"{planner}: {mix.requests} requests at {rate_rps:.2g} requests/s")
            runs.append(figures(await _send(stack.url, served, mix.at(rate_rps))))
    return {"alone_s": median(alone_s), "runs": runs}


async def _send(
    url: str, served: Served, workload: WorkloadOptions, concurrency: int | None = None
) -> list[float]:
    """Returns TTFTs in seconds, from each request's due time. Raises MillraceError when one
    fails.
    """
    options = ServeOptions(
        url=url, workload=workload, concurrency=concurrency, token_ids=served.token_ids
    )
    records = await run(options)
    for record in records:
        if record.error:
            raise MillraceError(f"a request failed: {record.error} ({record.detail})")
    return [record.ttft_s for record in records]


def simulated(
    planner: str,
    served: Served,
    profile: Profile,
    requests: Sequence[PlannedRequest],
    beyond_s: float,
) -> dict[str, float]:
    """Returns the simulator's figures. beyond_s: the part of a live TTFT that is not simulated."""
    config = load_config(overrides=served.with_planner(planner))
    rates = profile.kv_transfer_bytes_s
    spec = SimSpec(
        profile=profile,
        prefill=served.instances,
        decode=1,
        gpus_per_node=served.instances + 1,
        max_chunk_tokens=config.engine.max_chunk_tokens,
        scheduler=config.scheduler,
        transfer_backend=max(rates, key=lambda name: rates[name]),
    )
    ttft_s: list[float] = []

    def sink(record: RequestRecord) -> None:
        ttft_s.append(record.ttft_s + beyond_s)

    Simulation(spec, iter(requests), Collector(sink)).run()
    return figures(ttft_s)
