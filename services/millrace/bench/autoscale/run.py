"""Runs the stacks of `millrace bench autoscale` under the same load and makes the document."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from millrace.bench.autoscale.command import Settings
from millrace.bench.common.load_test import ServeOptions
from millrace.bench.common.load_test import run as send
from millrace.bench.common.machine_limits import describe_machine
from millrace.bench.common.models import LLAMA_27M
from millrace.bench.common.options import Announce
from millrace.bench.common.phased_load import (
    TOKEN_IDS,
    alone_s,
    arrivals,
    check_none_lost,
    engine_settings,
)
from millrace.bench.common.random_model import write_random_model
from millrace.bench.common.report import RequestRecord, summarise
from millrace.concurrency import beside
from millrace.local.autoscale import Decision
from millrace.local.options import StackOptions
from millrace.local.scaling import Scaling, autoscaled
from millrace.local.stack import Stack
from millrace.sim.workload.traces import TraceRow
from millrace.sim.workload.workload import SloClass, WorkloadOptions
from millrace.wire.clients.scheduler_client import SchedulerUnavailable, get_load

_SAMPLE_S = 1.0
_BIN_S = 10.0  # seconds, of attainment and load over time


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The inputs of all stacks: one instance's TTFT alone, the objectives, the load."""

    alone_s: float
    classes: list[SloClass]
    rows: list[TraceRow]


async def run(settings: Settings, announce: Announce = lambda what: None) -> dict[str, Any]:
    """Measures and returns the document. Raises MillraceError, also when a request is lost."""
    begun_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_random_model(Path(folder), LLAMA_27M))
        served: Served | None = None
        systems = []
        for name, sizes in settings.systems().items():
            announce(f"{name}: starting the stack")
            async with Stack(_stack_options(model, settings, sizes[0])) as stack:
                if served is None:
                    announce("a prompt alone")
                    served = _served(settings, await alone_s(stack.url, settings.lengths))
                seconds = sum(phase.seconds for phase in settings.phases)
                announce(f"{name}: {len(served.rows)} requests in {seconds:.0f} s")
                systems.append({"name": name, **await _system(stack, settings, served, sizes)})
    assert served is not None
    return {
        "benchmark": "autoscale",
        "settings": asdict(settings) | {"phases": [asdict(phase) for phase in settings.phases]},
        "machine": describe_machine(),
        "alone_s": served.alone_s,
        "ttft_slo_s": settings.slo_factor * served.alone_s,
        "requests": len(served.rows),
        "offered": _offered(served.rows),
        "systems": systems,
        "took_s": time.perf_counter() - begun_s,
    }


def _stack_options(model: str, settings: Settings, prefill: int) -> StackOptions:
    return StackOptions(
        model=model,
        prefill=prefill,
        decode=1,
        port=0,
        threads=settings.threads,
        settings=engine_settings(settings.kv_bytes),
    )


def _served(settings: Settings, alone: float) -> Served:
    slo_s = settings.slo_factor * alone
    return Served(
        alone_s=alone,
        classes=[SloClass(name=phase.name, ttft_s=slo_s) for phase in settings.phases],
        rows=list(arrivals(settings.phases, 1.0 / alone, settings.lengths, settings.seed)),
    )


async def _system(
    stack: Stack, settings: Settings, served: Served, sizes: tuple[int, int]
) -> dict[str, Any]:
    """Runs one stack under the load; returns the clients' figures and the instances over time."""
    decisions: list[Decision] = []
    samples: list[dict[str, Any]] = []
    lines: list[str] = []
    async with contextlib.AsyncExitStack() as around:
        if sizes[0] < sizes[1]:
            scaling = Scaling(sizes={"prefill": sizes}, config=settings.scaling)
            await around.enter_async_context(
                autoscaled(stack, scaling, lines.append, decisions.append)
            )
        begun_s = time.monotonic()
        async with beside(_sample(stack, begun_s, samples)):
            workload = WorkloadOptions(trace=served.rows, classes=served.classes)
            found = await send(
                ServeOptions(url=stack.url, workload=workload, token_ids=TOKEN_IDS, warmup=0)
            )
            # All systems are watched for an equal time, even if requests of the peak still run.
            end_s = begun_s + sum(phase.seconds for phase in settings.phases)
            await asyncio.sleep(max(0.0, end_s - time.monotonic()))
    check_none_lost(found)
    return {
        "sizes": sizes,
        "instance_s": instance_seconds(samples),
        "results": summarise(found, served.classes).to_json(),
        "attainment": attainment(found, served.classes),
        "samples": samples,
        "decisions": [_decision(one, begun_s) for one in decisions],
        "lines": lines,
    }


async def _sample(stack: Stack, begun_s: float, samples: list[dict[str, Any]]) -> None:
    """Notes the prefill pool's size and load every second."""
    address = f"127.0.0.1:{stack.services['scheduler'].port}"
    while True:
        with contextlib.suppress(SchedulerUnavailable):
            load = (await get_load(address)).of("prefill")
            names = stack.instances("prefill")
            samples.append(
                {
                    "at_s": time.monotonic() - begun_s,
                    "processes": len(names),
                    "ready": load.ready,
                    "draining": load.draining,
                    "backlog_s": load.backlog_s,
                    "arriving": load.arriving,
                    "ttft_slo_ratio": load.ttft_slo_ratio,
                }
            )
        await asyncio.sleep(_SAMPLE_S)


def instance_seconds(samples: Sequence[dict[str, Any]]) -> float:
    """Integrates the number of prefill processes, starting and draining ones included, over the
    samples.
    """
    return sum((a["processes"] * (b["at_s"] - a["at_s"]) for a, b in pairwise(samples)), 0.0)


def attainment(
    records: Sequence[RequestRecord], classes: Sequence[SloClass]
) -> list[tuple[float, float]]:
    """Returns the share of requests sent within each bin that met their objective, by the bin's
    middle.
    """
    slos = {slo.name: slo for slo in classes}
    bins: dict[int, list[bool]] = {}
    for record in records:
        met = record.meets_ttft(slos[record.class_name])
        bins.setdefault(int(record.sent_s // _BIN_S), []).append(met)
    return [((i + 0.5) * _BIN_S, statistics.fmean(met)) for i, met in sorted(bins.items())]


def _offered(rows: Sequence[TraceRow]) -> list[tuple[float, float]]:
    """Returns requests per second, by the middle of each bin."""
    counts: dict[int, int] = {}
    for row in rows:
        place = int((row.arrival_s or 0.0) // _BIN_S)
        counts[place] = counts.get(place, 0) + 1
    return [((i + 0.5) * _BIN_S, n / _BIN_S) for i, n in sorted(counts.items())]


def _decision(one: Decision, begun_s: float) -> dict[str, Any]:
    return {
        "at_s": one.at_s - begun_s,
        "size": one.size,
        "recommended": one.recommendation.replicas,
        "wished": one.recommendation.wished,
        "reason": one.recommendation.reason,
        "limited_by": one.recommendation.limited_by,
    }
