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
import random
import socket
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
import psutil

from millrace.bench.common.models import kv_bytes
from millrace.bench.common.random_model import write_random_model
from millrace.bench.common.sse_client import Response, SseClient
from millrace.bench.decode.bare import BareDecode
from millrace.bench.decode.command import Settings
from millrace.bench.decode.window import Costs, Sample, Window, costs_of, length_for, window_of
from millrace.concurrency import beside
from millrace.core.errors import MillraceError
from millrace.local.options import StackOptions
from millrace.local.stack import Stack

SAMPLE_EVERY_S = 0.5
_WARM_UP_TOKENS = 16


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
    threads = settings.threads or max(1, len(os.sched_getaffinity(0)) // 2)
    metrics_port = _free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = write_random_model(Path(name), settings.model)
        options = StackOptions(
            model=str(folder),
            prefill=1,
            decode=1,
            port=0,
            threads=threads,
            settings=[f"engine.dtype={settings.dtype}", "proxy.max_new_tokens=32768"],
            role_settings={
                "prefill": [f"engine.threads={settings.prefill_threads or threads}"],
                "decode": [f"telemetry.metrics_port={metrics_port}"],
            },
        )
        async with Stack(options, on_progress) as stack:
            served = _Served(stack, metrics_port, settings)
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
    return {
        "benchmark": "decode",
        "settings": {**asdict(settings), "model": dict(settings.model), "threads": threads},
        "output_tokens": output_tokens,
        "cpus": os.cpu_count(),
        "stack_tokens_per_s": stack_rate,
        "bare_tokens_per_s": bare_rate,
        "ratio": stack_rate / bare_rate,
        "rounds": [asdict(r) for r in rounds],
    }


async def _round(
    served: _Served,
    bare: BareDecode,
    settings: Settings,
    number: int,
    on_progress: Callable[[str], None],
) -> Round:
    on_progress(f"round {number + 1} of {settings.rounds}: the stack")
    window, costs = await served.measure(number)
    on_progress(f"round {number + 1} of {settings.rounds}: the bare engine")
    steps = max(1, window.tokens // settings.batch)
    rate = await asyncio.to_thread(bare.tokens_per_s, window.context_tokens, steps)
    return Round(
        window_s=window.end_s - window.start_s,
        stack_tokens_per_s=window.tokens_per_s,
        bare_tokens_per_s=rate,
        bare_step_ms=1e3 * settings.batch / rate,
        costs=costs,
    )


class _Served:
    """The client of the stack."""

    def __init__(self, stack: Stack, metrics_port: int, settings: Settings) -> None:
        self._settings = settings
        self._output_tokens = _WARM_UP_TOKENS
        self._client = SseClient(stack.url)
        self._metrics = SseClient(f"http://127.0.0.1:{metrics_port}")
        self._processes = {
            name: psutil.Process(service.process.pid)
            for name, service in stack.services.items()
            if service.process is not None
        }
        self._processes["client"] = psutil.Process()

    def close(self) -> None:
        self._client.close()
        self._metrics.close()

    async def warm_up(self) -> int:
        """Sends one round of short outputs. Returns the tokens that each request asks for from now
        on.
        """
        self._output_tokens = length_for(await self._generate("warm-up"), self._settings.steps)
        return self._output_tokens

    async def measure(self, number: int) -> tuple[Window, Costs | None]:
        """Runs one round: all requests at once, to their ends."""
        samples: list[Sample] = []
        async with beside(self._watch(samples)):
            streams = await self._generate(str(number))
        window = window_of(streams, self._settings.prompt_tokens)
        return window, costs_of(samples, window)

    async def _generate(self, seed: str) -> list[list[tuple[float, int]]]:
        """Sends all requests at once; returns (time, tokens) of each event, by stream."""
        bodies = [self._body(f"{seed}/{i}") for i in range(self._settings.batch)]
        responses = await asyncio.gather(
            *(self._client.post("/v1/completions", body) for body in bodies)
        )
        return [list(_arrivals(response)) for response in responses]

    def _body(self, seed: str) -> bytes:
        prompt = random.Random(seed).choices(
            range(self._settings.model["vocab_size"]), k=self._settings.prompt_tokens
        )
        return orjson.dumps(
            {
                "model": "random-llama",
                "prompt": prompt,
                "max_tokens": self._output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "stream": True,
            }
        )

    async def _watch(self, samples: list[Sample]) -> None:
        while True:
            found = (await self._metrics.get("/metrics")).body.decode()
            name = "millrace_decode_step_seconds"
            samples.append(
                Sample(
                    at_s=time.perf_counter(),
                    steps=_value(found, f"{name}_count"),
                    step_s=_value(found, f"{name}_sum"),
                    cpu_s={n: sum(p.cpu_times()[:2]) for n, p in self._processes.items()},
                )
            )
            await asyncio.sleep(SAMPLE_EVERY_S)


def _value(metrics: str, name: str) -> float:
    for line in metrics.splitlines():
        if line.startswith(f"{name} "):
            return float(line.split()[1])
    raise MillraceError(f"the decode instance's metrics lack {name}")


def _arrivals(response: Response) -> Iterator[tuple[float, int]]:
    """Yields (time, tokens) of each event of a stream; every token is one word."""
    if response.status != 200:
        raise MillraceError(f"HTTP status {response.status}: {bytes(response.body[:300])!r}")
    for at_s, data in response.events:
        if data == b"[DONE]":
            return
        event = orjson.loads(data)
        if "error" in event:
            raise MillraceError(f"a request failed: {event['error']}")
        if words := sum(len(choice["text"].split()) for choice in event["choices"]):
            yield at_s, words
    raise MillraceError("a stream ended early")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
