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
from millrace.bench.common.thread_times import busiest, thread_times
from millrace.bench.overload.command import FILLING, OVERLOAD, PEAK, Settings
from millrace.concurrency import beside
from millrace.core.errors import MillraceError
from millrace.local.options import StackOptions
from millrace.local.stack import Stack
from millrace.sim.workload.workload import SloClass, WorkloadOptions

#: The share of first tokens in time at a rate that a stack sustains.
GOAL = 0.9
REFUSED = "http 429"
#: Load of the peak, in sustainable rates, if the sweep found none too high.
_PEAK_LOAD = 1.2
_COMPUTING = "prefill-0"
_LEAST_REQUESTS = 10  # of a rate, on average: nine of ten must be in time
_SAMPLE_S = 0.5
_MIB = 1 << 20


class NothingSustainedError(MillraceError):
    """The lowest rate of the sweep is too high for this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Swept:
    """What the stack served at one rate. `goodput_rps`: first tokens in time per second."""

    load: float
    rate_rps: float
    goodput_rps: float
    attainment: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """The seconds of a phase in which first tokens count, since the first phase's begin."""

    phase: str
    from_s: float
    until_s: float

    @classmethod
    def of(cls, phase: Phase, begin_s: float) -> Window:
        end_s = begin_s + phase.seconds
        return cls(phase=phase.name, from_s=begin_s + FILLING * phase.seconds, until_s=end_s)

    @property
    def seconds(self) -> float:
        return self.until_s - self.from_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the stack served in a window. `ran`, `waited`: shares of the time in which prefill's
    compute thread ran, and in which it waited for a core; None where the kernel counts none.
    """

    phase: str
    seconds: float
    served: int
    in_time: int
    ran: float | None
    waited: float | None


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
            rate_rps, load = sustained(swept).rate_rps, peak_load(swept)
            announce(f"{load:.2g} and {settings.factor:g} times {rate_rps:.2f} requests a second")
            phases = settings.phases(load)
            records, samples = await _phases(stack, settings, phases, rate_rps, slo)
    counted = windows(phases)
    end_s = counted[-1].until_s
    return {
        "benchmark": "overload",
        "settings": asdict(settings),
        "machine": describe_machine(),
        "alone_s": alone,
        "ttft_slo_s": slo.ttft_s,
        "sweep": [asdict(one) for one in swept],
        "sustained_rps": rate_rps,
        "peak_load": load,
        **figures(records, turns(records, counted, samples, slo), end_s, slo),
        "memory_mib": memory(samples, counted[0].from_s, end_s),
        "samples": [{key: one[key] for key in ("at_s", "memory_mib")} for one in samples],
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
        window = Window.of(phase, 0.0)
        goodput_rps = sum(r.meets_ttft(slo) for r in _served(records, window)) / window.seconds
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


def peak_load(swept: Sequence[Swept]) -> float:
    """Returns the load of the peak in sustainable rates: of the first rate that is too high."""
    rate_rps = sustained(swept).rate_rps
    return min((s.rate_rps / rate_rps for s in swept if s.rate_rps > rate_rps), default=_PEAK_LOAD)


def windows(phases: Sequence[Phase]) -> list[Window]:
    """Returns the windows of the peaks and overloads, in order."""
    found, begin_s = [], 0.0
    for phase in phases:
        found.append(Window.of(phase, begin_s))
        begin_s += phase.seconds
    return found[1:-1]


async def _phases(
    stack: Stack,
    settings: Settings,
    phases: Sequence[Phase],
    sustained_rps: float,
    slo: SloClass,
) -> tuple[list[RequestRecord], list[dict[str, Any]]]:
    """Serves the phases; returns the requests, and over time the services' memory and the times of
    prefill's threads.
    """
    samples: list[dict[str, Any]] = []
    begun_s = time.monotonic()
    async with beside(_sample(stack, begun_s, samples)):
        records = await _send(stack, settings, phases, sustained_rps, slo)
        # Few requests may end before the phases do.
        end_s = begun_s + sum(phase.seconds for phase in phases)
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
    """Notes twice a second the resident memory of every service, in MiB, and the times of the
    threads of prefill.
    """
    while True:
        memory_mib = {}
        for name, service in stack.services.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                if service.serving_pid is not None:
                    rss = psutil.Process(service.serving_pid).memory_info().rss
                    memory_mib[name] = rss / _MIB
        pid = stack.services[_COMPUTING].serving_pid
        threads = {} if pid is None else thread_times(pid)
        at_s = time.monotonic() - begun_s
        samples.append({"at_s": at_s, "memory_mib": memory_mib, "threads": threads})
        await asyncio.sleep(_SAMPLE_S)


def turns(
    records: Sequence[RequestRecord],
    windows: Sequence[Window],
    samples: Sequence[dict[str, Any]],
    slo: SloClass,
) -> list[Turn]:
    """Returns what the stack served in each window. `samples`: see `_sample`."""
    thread = busiest(sample["threads"] for sample in samples)
    found = []
    for window in windows:
        served = _served(records, window)
        ran, waited = _shares(thread, window, samples)
        found.append(
            Turn(
                phase=window.phase,
                seconds=window.seconds,
                served=len(served),
                in_time=sum(record.meets_ttft(slo) for record in served),
                ran=ran,
                waited=waited,
            )
        )
    return found


def _served(records: Sequence[RequestRecord], window: Window) -> list[RequestRecord]:
    """Returns the requests whose first token came within the window."""
    return [
        r
        for r in records
        if r.token_times_s and window.from_s <= r.token_times_s[0] < window.until_s
    ]


def _shares(
    thread: int | None, window: Window, samples: Sequence[dict[str, Any]]
) -> tuple[float, float] | tuple[None, None]:
    """Returns the shares of the window in which the thread ran and waited for a core."""
    seen = [
        (one["at_s"], one["threads"][thread])
        for one in samples
        if window.from_s <= one["at_s"] <= window.until_s and thread in one["threads"]
    ]
    if len(seen) < 2:
        return None, None
    (from_s, first), (until_s, last) = seen[0], seen[-1]
    seconds = until_s - from_s
    return (last.ran_s - first.ran_s) / seconds, (last.waited_s - first.waited_s) / seconds


def figures(
    records: Sequence[RequestRecord], turns: Sequence[Turn], end_s: float, slo: SloClass
) -> dict[str, Any]:
    """Returns the figures of all phases; the last overload ends at `end_s`."""
    peaks = [turn for turn in turns if turn.phase.startswith(PEAK)]
    overloads = [turn for turn in turns if turn.phase.startswith(OVERLOAD)]
    served_rps = sum(t.served for t in overloads) / sum(t.seconds for t in overloads)
    refused = [r for r in records if r.error == REFUSED]
    waiting = sum(r.sent_s < end_s <= r.ended_s and r.error != REFUSED for r in records)
    return {
        "turns": [asdict(turn) for turn in turns],
        "served_rps": served_rps,
        "goodput_rps": _goodput_rps(overloads),
        "peak_goodput_rps": _goodput_rps(peaks),
        "over_peak": _over(_goodput_rps(overloads), _goodput_rps(peaks)),
        "over_peak_by_turn": [
            _over(_goodput_rps([overload]), _goodput_rps([peak]))
            for peak, overload in zip(peaks, overloads, strict=True)
        ],
        "over_peak_per_compute": _over(_per_compute(overloads), _per_compute(peaks)),
        "ends": Counter(_end_of(r, slo) for r in records),
        "errors": Counter(r.error for r in records if r.error),
        "refusal_ms": asdict(Distribution.of_seconds(r.e2e_s for r in refused)),
        "send_lag_ms": asdict(
            Distribution.of_seconds(r.sent_s - r.due_s for r in records if r.due_s is not None)
        ),
        "waiting": waiting,
        "drain_s": waiting / served_rps if served_rps else None,
        "recovery_s": recovery_s([r for r in records if r.sent_s >= end_s], slo, end_s),
    }


def _goodput_rps(turns: Sequence[Turn]) -> float:
    return sum(turn.in_time for turn in turns) / sum(turn.seconds for turn in turns)


def _per_compute(turns: Sequence[Turn]) -> float | None:
    """Returns the first tokens in time per second for which the compute thread ran."""
    ran_s = [turn.seconds * turn.ran for turn in turns if turn.ran is not None]
    if len(ran_s) < len(turns) or not sum(ran_s):
        return None
    return sum(turn.in_time for turn in turns) / sum(ran_s)


def _over(one: float | None, other: float | None) -> float | None:
    return one / other if one is not None and other else None


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
