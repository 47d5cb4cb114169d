"""Runs a stack beyond its load for `millrace bench overload`, and makes the document."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from millrace.bench.common.load_test import ServeOptions
from millrace.bench.common.load_test import run as send
from millrace.bench.common.machine_limits import describe_machine
from millrace.bench.common.models import LLAMA_27M
from millrace.bench.common.options import Announce
from millrace.bench.common.phased_load import TOKEN_IDS, alone_s, arrivals, engine_settings
from millrace.bench.common.phases import Phase
from millrace.bench.common.random_model import write_random_model
from millrace.bench.common.report import Distribution, RequestRecord
from millrace.bench.overload.command import Settings
from millrace.concurrency import beside
from millrace.core.errors import MillraceError
from millrace.local.options import StackOptions
from millrace.local.stack import Stack
from millrace.sim.workload.workload import SloClass, WorkloadOptions

#: The share of first tokens in time at a rate that a stack sustains.
GOAL = 0.9
REFUSED = "http 429"
_LEAST_REQUESTS = 10  # of a rate, on average: nine of ten must be in time
_SAMPLE_S = 0.5
_MIB = 1 << 20


class NothingSustainedError(MillraceError):
    """The lowest rate of the sweep is too high for this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What the stack served at one rate. `goodput_rps`: requests a second that were in time."""

    load: float
    rate_rps: float
    goodput_rps: float
    attainment: float


async def run(settings: Settings, announce: Announce = lambda what: None) -> dict[str, Any]:
    """Measures and returns the document. Raises MillraceError when the stack can't start, and
    NothingSustainedError.
    """
    begun_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_random_model(Path(folder), LLAMA_27M))
        announce("starting the stack")
        async with Stack(_stack_options(model, settings)) as stack:
            announce("prompts one after another")
            alone = await alone_s(stack.url, settings.lengths)
            slo = SloClass(name="default", ttft_s=settings.slo_factor * alone)
            swept = await _sweep(stack, settings, 1.0 / alone, slo, announce)
            rate_rps = sustained(swept).rate_rps
            announce(f"{settings.factor:g} times {rate_rps:.2f} requests a second")
            records, samples = await _phases(stack, settings, rate_rps, slo)
    return {
        "benchmark": "overload",
        "settings": asdict(settings),
        "machine": describe_machine(),
        "alone_s": alone,
        "ttft_slo_s": slo.ttft_s,
        "sweep": [asdict(one) for one in swept],
        "sustained_rps": rate_rps,
        "peak_goodput_rps": max(one.goodput_rps for one in swept),
        **figures(records, settings, slo),
        "memory_mib": memory(samples, settings.full_s, settings.end_s),
        "samples": samples,
        "requests": [
            {"sent_s": r.sent_s, "ended_s": r.ended_s, "end": _end_of(r, slo)} for r in records
        ],
        "took_s": time.perf_counter() - begun_s,
    }


def _stack_options(model: str, settings: Settings) -> StackOptions:
    return StackOptions(
        model=model,
        prefill=1,
        decode=1,
        port=0,
        threads=settings.threads,
        settings=[
            *engine_settings(settings.kv_bytes),
            f"scheduler.policy={settings.policy}",
            f"scheduler.max_queue_s={settings.queue_s}",
        ],
    )


async def _sweep(
    stack: Stack, settings: Settings, capacity_rps: float, slo: SloClass, announce: Announce
) -> list[Swept]:
    """Serves rising rates, up to the first one that the stack does not sustain."""
    found: list[Swept] = []
    for load in settings.loads:
        seconds = max(settings.sweep_s, _LEAST_REQUESTS / (load * capacity_rps))
        announce(f"{load * capacity_rps:.2f} requests a second for {seconds:.0f} s")
        phase = Phase(name="default", load=load, seconds=seconds)
        records = await _send(stack, settings, [phase], capacity_rps, slo)
        met = [record.meets_ttft(slo) for record in records]
        share = statistics.fmean(met) if met else 1.0
        goodput_rps = sum(met) / seconds
        rate_rps = load * capacity_rps
        found.append(Swept(load=load, rate_rps=rate_rps, goodput_rps=goodput_rps, attainment=share))
        if share < GOAL:
            break
    return found


def sustained(swept: Sequence[Swept]) -> Swept:
    """Returns the highest rate that the stack sustains. Raises NothingSustainedError."""
    found = [one for one in swept if one.attainment >= GOAL]
    if not found:
        lowest = swept[0]
        raise NothingSustainedError(
            f"--loads {lowest.load:g}: only {100 * lowest.attainment:.0f} % of the first tokens "
            f"are in time at {lowest.rate_rps:.2f} requests a second; give lower loads"
        )
    return max(found, key=lambda one: one.rate_rps)


async def _phases(
    stack: Stack, settings: Settings, sustained_rps: float, slo: SloClass
) -> tuple[list[RequestRecord], list[dict[str, Any]]]:
    """Serves the three phases; returns the requests, and the services' memory over time."""
    samples: list[dict[str, Any]] = []
    begun_s = time.monotonic()
    async with beside(_sample(stack, begun_s, samples)):
        records = await _send(stack, settings, settings.phases, sustained_rps, slo)
        # Few requests may end before the phases do.
        end_s = begun_s + sum(phase.seconds for phase in settings.phases)
        await asyncio.sleep(max(0.0, end_s - time.monotonic()))
    return records, samples


async def _send(
    stack: Stack, settings: Settings, phases: Sequence[Phase], whole_rps: float, slo: SloClass
) -> list[RequestRecord]:
    rows = list(arrivals(phases, whole_rps, settings.lengths, settings.seed))
    classes = [SloClass(name=phase.name, ttft_s=slo.ttft_s) for phase in phases]
    workload = WorkloadOptions(trace=rows, classes=classes)
    return await send(ServeOptions(url=stack.url, workload=workload, token_ids=TOKEN_IDS, warmup=0))


async def _sample(stack: Stack, begun_s: float, samples: list[dict[str, Any]]) -> None:
    """Notes the resident memory of every service twice a second, in MiB."""
    while True:
        memory_mib = {}
        for name, service in stack.services.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                if service.serving_pid is not None:
                    rss = psutil.Process(service.serving_pid).memory_info().rss
                    memory_mib[name] = rss / _MIB
        samples.append({"at_s": time.monotonic() - begun_s, "memory_mib": memory_mib})
        await asyncio.sleep(_SAMPLE_S)


def figures(records: Sequence[RequestRecord], settings: Settings, slo: SloClass) -> dict[str, Any]:
    """Returns the figures of the three phases."""
    full_s, end_s = settings.full_s, settings.end_s
    served = [r for r in records if r.token_times_s and full_s <= r.token_times_s[0] < end_s]
    served_rps = len(served) / (end_s - full_s)
    refused = [r for r in records if r.error == REFUSED]
    waiting = sum(r.sent_s < end_s <= r.ended_s and r.error != REFUSED for r in records)
    return {
        "served_rps": served_rps,
        "goodput_rps": sum(r.meets_ttft(slo) for r in served) / (end_s - full_s),
        "ends": Counter(_end_of(r, slo) for r in records),
        "errors": Counter(r.error for r in records if r.error),
        "refusal_ms": asdict(Distribution.of_seconds(r.e2e_s for r in refused)),
        "waiting": waiting,
        "drain_s": waiting / served_rps if served_rps else None,
        "recovery_s": recovery_s([r for r in records if r.sent_s >= end_s], slo, end_s),
    }


def recovery_s(records: Sequence[RequestRecord], slo: SloClass, end_s: float) -> float | None:
    """Returns the seconds from `end_s` until the requests that are sent from then on meet the goal;
    None: they never do. `records` are those sent after `end_s`.
    """
    ordered = sorted(records, key=lambda record: record.sent_s)
    met = [record.meets_ttft(slo) for record in ordered]
    for first, record in enumerate(ordered):
        if statistics.fmean(met[first:]) >= GOAL:
            return max(record.sent_s - end_s, 0.0)
    return None


def memory(
    samples: Sequence[dict[str, Any]], from_s: float, until_s: float
) -> dict[str, list[float]]:
    """Returns each service's mean memory in the first and in the last quarter of a time, MiB."""
    quarter_s = (until_s - from_s) / 4
    first = [s["memory_mib"] for s in samples if from_s <= s["at_s"] < from_s + quarter_s]
    last = [s["memory_mib"] for s in samples if until_s - quarter_s <= s["at_s"] < until_s]
    names = sorted({name for found in (*first, *last) for name in found})
    return {name: [_mean(name, first), _mean(name, last)] for name in names}


def _mean(name: str, found: Sequence[dict[str, float]]) -> float:
    return statistics.fmean([one[name] for one in found if name in one] or [0.0])


def _end_of(record: RequestRecord, slo: SloClass) -> str:
    """Returns how a request ended: in time, late, refused or failed."""
    if record.error:
        return "refused" if record.error == REFUSED else "failed"
    return "in time" if record.meets_ttft(slo) else "late"
