"""`millrace bench decode`: compares decode through the whole stack with the bare engine, in one
run.

A stack of one prefill and one decode instance, scheduler, gateway and Redis starts on this machine
with a random-weight Llama of about 100 million parameters. In each round, `--batch` streaming
requests are sent at once, long enough for about `--steps` common steps (a warm-up measures how much
longer the first request must be). The tokens that reach the client are counted from the moment when
all requests decode until the first one ends. Then the bare engine (`DecodeBatch.step` in this
process, with the decode instance's threads) takes as many steps from the same context lengths,
while the stack is idle.

The decode instance's metrics within the same window show the remaining costs: the time of a step
there compared with the bare engine (the cost of other processes on the same cores), the time
between steps (the cost of the instance's own loop), and CPU time per step by process.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from millrace.bench.common.models import kv_bytes
from millrace.bench.common.random_model import write_random_model
from millrace.bench.decode import telemetry_cost
from millrace.bench.decode.bare import BareDecode
from millrace.bench.decode.command import Settings
from millrace.bench.decode.served import Served, compute_threads, free_port, stack_options
from millrace.bench.decode.window import Costs
from millrace.local.stack import Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Both sides, measured once. `costs` is None where the window was too short to measure them."""

    window_s: float
    stack_tokens_per_s: float
    bare_tokens_per_s: float
    bare_step_ms: float
    costs: Costs | None


async def run(
    settings: Settings, on_progress: Callable[[str], None] = lambda what: None
) -> dict[str, Any]:
    """Measures and returns the report as one JSON-ready document.

    Raises MillraceError when the stack does not start, a request fails, or the requests are too
    short to decode all at once.
    """
    if settings.telemetry:
        return _document(settings, await telemetry_cost.run(settings, on_progress))
    threads = compute_threads(settings)
    metrics_port = free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = write_random_model(Path(name), settings.model)
        options = stack_options(folder, settings, (), {"decode": metrics_port})
        async with Stack(options, on_progress) as stack:
            served = Served(stack, settings, metrics_port)
            try:
                on_progress("warming up")
                output_tokens = await served.warm_up()
                bare = BareDecode(
                    folder,
                    dtype=settings.dtype,
                    threads=threads,
                    kv_bytes=kv_bytes(
                        settings.model,
                        # A few spare pages each.
                        settings.batch * (settings.prompt_tokens + output_tokens + 64),
                        settings.dtype,
                    ),
                )
                rounds = [
                    await _round(served, bare, settings, number, on_progress)
                    for number in range(settings.rounds)
                ]
            finally:
                served.close()
    stack_rate = statistics.median(r.stack_tokens_per_s for r in rounds)
    bare_rate = statistics.median(r.bare_tokens_per_s for r in rounds)
    found = {
        "output_tokens": output_tokens,
        "stack_tokens_per_s": stack_rate,
        "bare_tokens_per_s": bare_rate,
        "ratio": stack_rate / bare_rate,
        "rounds": [asdict(r) for r in rounds],
    }
    return _document(settings, found)


def _document(settings: Settings, found: dict[str, Any]) -> dict[str, Any]:
    shown = {
        **asdict(settings),
        "model": dict(settings.model),
        "threads": compute_threads(settings),
    }
    return {"benchmark": "decode", "settings": shown, "cpus": os.cpu_count(), **found}


async def _round(
    served: Served,
    bare: BareDecode,
    settings: Settings,
    number: int,
    on_progress: Callable[[str], None],
) -> Round:
    on_progress(f"round {number + 1} of {settings.rounds}: the stack")
    answers = await served.measure(number)
    window = answers.window
    on_progress(f"round {number + 1} of {settings.rounds}: the bare engine")
    steps = max(1, window.tokens // settings.batch)
    rate = await asyncio.to_thread(bare.tokens_per_s, window.context_tokens, steps)
    return Round(
        window_s=window.end_s - window.start_s,
        stack_tokens_per_s=window.tokens_per_s,
        bare_tokens_per_s=rate,
        bare_step_ms=1e3 * settings.batch / rate,
        costs=answers.costs,
    )
