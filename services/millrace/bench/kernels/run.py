"""`millrace bench kernels`: compares each kernel of the public API with torch and with the machine.

A call is compared with the machine's limit: the time that its FLOPs take at the measured peak of a
matrix product of its dtype, or that its bytes take at the measured bandwidth of reading memory,
whichever is longer. Both sides report this share of the peak, and the rate in the unit that bounds
it. Row-by-row kernels are bound by memory; at 8 rows their data is in a cache, so the share can
exceed 1, or be as low as the cost of a call allows.

The sides take turns within one run, so that other load affects both equally; medians are compared,
and the sides' first results must agree. Apart from the cases, attention's time per token is
measured for small chunks and for large chunks over the same long history: the cost of chunking.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from millrace.bench.common.machine_limits import (
    describe_machine,
    gemm_flops_per_s,
    read_bytes_per_s,
    torch_threads,
)
from millrace.bench.kernels.attention_cases import PagedKv, attention_cases
from millrace.bench.kernels.case import DTYPES, Case, Item, Sizes
from millrace.bench.kernels.command import CHUNKS, Settings
from millrace.bench.kernels.row_cases import row_cases
from millrace.core.errors import MillraceError
from millrace_kernels import api

GOAL_CHUNKS = 1.25
"""The most that a token of a small chunk may cost, in costs of a token of a large chunk."""

_SAMPLES = 15
_TOLERANCE = {"float32": 2e-3, "bfloat16": 5e-2}
"""The largest allowed difference of the sides' results, relative to the largest value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Peaks:
    """The machine's limits: FLOP/s of a matrix product by dtype, bytes/s of reading."""

    flops_per_s: dict[str, float]
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One line: rates in `unit`, `share` of the peak of both, `ratio` above 1 where ours is faster.

    ours_s, other_s: median seconds of a call.
    """

    kernel: str
    shape: str
    dtype: str
    against: str
    ours_s: float
    other_s: float
    unit: str
    ours: float
    other: float
    ours_share: float
    other_share: float
    ratio: float


def cases_of(settings: Settings) -> list[Case]:
    """Returns the cases, in the order they run."""
    return [
        case
        for dtype in settings.dtypes
        for cases in (attention_cases, row_cases)
        for case in cases(settings.sizes or Sizes(), dtype)
        if case.kernel in settings.names
    ]


def run(
    settings: Settings,
    *,
    on_progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Any]:
    """Measures every case and returns the report as one JSON-ready document.

    on_progress(cases done, in total, the running step) is
    called before each case. Raises MillraceError when a kernel's result differs from torch's.
    """
    cases = cases_of(settings)
    chunked = settings.dtypes if CHUNKS in settings.names else ()
    total = 1 + len(cases) + len(chunked)
    results: list[Result] = []
    with torch_threads(settings.threads), torch.inference_mode():
        on_progress(0, total, "the machine's peaks")
        peaks = measure_peaks(settings)
        for done, case in enumerate(cases, 1):
            on_progress(done, total, f"{case.kernel} {case.dtype} {case.shape}")
            results.append(compare(case, peaks, settings.budget_s))
        chunks: list[dict[str, Any]] = []
        for dtype in chunked:
            on_progress(1 + len(cases) + len(chunks), total, f"chunks {dtype}")
            chunks.append(measure_chunks(settings, dtype))
        machine = describe_machine()
    on_progress(total, total, "done")
    return {
        "benchmark": "kernels",
        "machine": machine,
        "peaks": asdict(peaks),
        "results": [asdict(result) for result in results],
        "chunks": chunks,
        "goal_chunks": GOAL_CHUNKS,
    }


def measure(
    calls: Sequence[Callable[[], Item]],
    budget_s: float,
    check: Callable[[Sequence[Item]], None] = lambda results: None,
) -> list[list[float]]:
    """Returns seconds of a call, several samples of each; the calls take turns until the budget is
    spent.

    A sample has as many calls as its share of the budget holds. If the first calls alone, which
    touch memory and start threads, take long, they are the samples. `check` gets their results.
    """
    results, first = [], []
    for call in calls:
        started = time.perf_counter()
        results.append(call())
        first.append(time.perf_counter() - started)
    check(results)
    if sum(first) > 4 * budget_s:
        return [[took] for took in first]
    share_s = budget_s / _SAMPLES / len(calls)
    counts = [max(1, int(share_s / max(_time(call, 1), 1e-9))) for call in calls]
    samples: list[list[float]] = [[] for _ in calls]
    ends = time.perf_counter() + budget_s
    while not samples[0] or time.perf_counter() < ends:
        for call, count, found in zip(calls, counts, samples, strict=True):
            found.append(_time(call, count))
    return samples


def _time(call: Callable[[], object], count: int) -> float:
    started = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - started) / count


def measure_peaks(settings: Settings) -> Peaks:
    """Measures the peaks. Bfloat16 data can be multiplied in float32, so float32's peak is the
    least of both.
    """
    flops_per_s: dict[str, float] = {}
    for dtype in DTYPES:
        rate = gemm_flops_per_s(dtype, settings.peak_side)
        flops_per_s[dtype] = max(rate, *flops_per_s.values(), 0.0)
    return Peaks(flops_per_s=flops_per_s, bytes_per_s=read_bytes_per_s(settings.read_bytes))


def compare(case: Case, peaks: Peaks, budget_s: float) -> Result:
    sides = case.make()
    samples = measure(
        (sides.ours, sides.other), budget_s, lambda results: _check_agreement(case, *results)
    )
    ours_s, other_s = map(statistics.median, samples)
    compute_s = case.flops / peaks.flops_per_s[case.dtype]
    read_s = case.moved_bytes / peaks.bytes_per_s
    work, unit = (case.flops, "GFLOP/s") if compute_s > read_s else (case.moved_bytes, "GB/s")
    least_s = max(compute_s, read_s)
    return Result(
        kernel=case.kernel,
        shape=case.shape,
        dtype=case.dtype,
        against=case.against,
        ours_s=ours_s,
        other_s=other_s,
        unit=unit,
        ours=work / ours_s / 1e9,
        other=work / other_s / 1e9,
        ours_share=least_s / ours_s,
        other_share=least_s / other_s,
        ratio=other_s / ours_s,
    )


def _check_agreement(case: Case, ours: Tensor, other: Tensor) -> None:
    largest = float(other.double().abs().max())
    difference = float((ours.double() - other.double()).abs().max())
    if not difference <= _TOLERANCE[case.dtype] * largest:
        raise MillraceError(
            f"{case.kernel} {case.dtype} ({case.shape}) differs by {difference:g} from "
            f"{case.against}: the results must agree"
        )


def measure_chunks(settings: Settings, dtype: str) -> dict[str, Any]:
    """Returns attention's microseconds per token in small and in large chunks over one long
    history.
    """
    calls, sizes = [], settings.sizes or Sizes()
    for rows in settings.chunk_rows:
        kv_len = settings.chunk_history + rows
        paged = PagedKv(sizes, dtype, batch=1, q_len=rows, kv_len=kv_len)
        plan, layer, q_nhd, scale = paged.plan(), paged.layer(), paged.q_nhd, sizes.scale
        calls.append(
            lambda plan=plan, q=q_nhd, kv=layer, scale=scale: api.run_attention(
                plan, q, kv, scale=scale
            )
        )
    medians = map(statistics.median, measure(calls, 8 * settings.budget_s))
    small_us, large_us = (
        took / rows * 1e6 for took, rows in zip(medians, settings.chunk_rows, strict=True)
    )
    return {
        "dtype": dtype,
        "history": settings.chunk_history,
        "rows": settings.chunk_rows,
        "us_per_token": (small_us, large_us),
        "ratio": small_us / large_us,
    }
