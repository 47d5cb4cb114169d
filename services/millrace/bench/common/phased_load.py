"""The load of benchmarks that go through phases: Poisson arrivals of prompts of random lengths."""

from __future__ import annotations

import random
import statistics
from collections.abc import Iterable, Sequence

from millrace.bench.common.load_test import ServeOptions
from millrace.bench.common.load_test import run as send
from millrace.bench.common.models import LLAMA_27M
from millrace.bench.common.phases import Lengths, Phase
from millrace.bench.common.report import RequestRecord
from millrace.core.errors import MillraceError
from millrace.sim.workload.traces import TraceRow
from millrace.sim.workload.workload import WorkloadOptions

#: Of the random model that these benchmarks serve.
TOKEN_IDS = (0, LLAMA_27M["vocab_size"] - 1)
_ALONE = 8  # prompts one after another, to measure one instance's capacity


def engine_settings(kv_bytes: int) -> list[str]:
    """Returns the settings of stacks whose instances compute all that is asked."""
    return [
        "engine.device=cpu",
        "engine.dtype=float32",
        "engine.profile=none",
        f"engine.kv_bytes={kv_bytes}",
        "engine.prefix_cache=off",
    ]


class RequestsLostError(MillraceError):
    """Requests failed, or their answers were cut short."""


def arrivals(
    phases: Iterable[Phase], whole_rps: float, lengths: Lengths, seed: int
) -> Iterable[TraceRow]:
    """Yields Poisson arrivals at each phase's share of a rate; a request's class is the phase of
    its arrival.
    """
    rng = random.Random(seed)
    begin_s = 0.0
    for phase in phases:
        at_s = begin_s
        begin_s += phase.seconds
        while (at_s := at_s + rng.expovariate(phase.load * whole_rps)) < begin_s:
            tokens = rng.randint(lengths.prompt_tokens // 2, 3 * lengths.prompt_tokens // 2)
            yield TraceRow(
                arrival_s=at_s,
                input_tokens=tokens,
                output_tokens=lengths.output_tokens,
                class_name=phase.name,
            )


async def alone_s(url: str, lengths: Lengths) -> float:
    """Returns the median TTFT in seconds of prompts of the mean length, one after another."""
    row = TraceRow(
        arrival_s=None, input_tokens=lengths.prompt_tokens, output_tokens=lengths.output_tokens
    )
    workload = WorkloadOptions(trace=[row], open_arrivals=True, requests=_ALONE)
    found = await send(ServeOptions(url=url, workload=workload, concurrency=1, token_ids=TOKEN_IDS))
    check_none_lost(found)
    return statistics.median(record.ttft_s for record in found)


def check_none_lost(records: Sequence[RequestRecord]) -> None:
    """Raises RequestsLostError unless every request has its whole answer."""
    lost = [r for r in records if r.error or r.output_tokens != r.asked_tokens]
    if lost:
        first = lost[0].error or f"{lost[0].output_tokens} of {lost[0].asked_tokens} tokens"
        raise RequestsLostError(
            f"{len(lost)} of {len(records)} requests were lost, the first by: {first} "
            f"{lost[0].detail}"
        )
