"""The client of a stack whose decode is measured."""

from __future__ import annotations

import asyncio
import os
import random
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson

from millrace.bench.common.sse_client import Response, SseClient
from millrace.bench.common.thread_times import process_ran_s
from millrace.bench.decode.command import Settings
from millrace.bench.decode.window import Costs, Sample, Window, costs_of, length_for, window_of
from millrace.concurrency import beside
from millrace.core.errors import MillraceError
from millrace.local.options import StackOptions
from millrace.local.stack import Stack

SAMPLE_EVERY_S = 0.5
_WARM_UP_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """All requests of a round, sent at once: prompts per second until the last one's first token,
    decode within the window, CPU seconds by process until the last answer ended.

    `costs` is None where the window was too short, or the decode instance has no metrics.
    """

    prompt_tokens_per_s: float
    window: Window
    costs: Costs | None
    cpu_s: dict[str, float]


class Served:
    """Sends the rounds of `millrace bench decode` to a stack."""

    def __init__(self, stack: Stack, settings: Settings, metrics_port: int = 0) -> None:
        """metrics_port: the decode instance's; 0: it has none."""
        self._settings = settings
        self._output_tokens = _WARM_UP_TOKENS
        self._client = SseClient(stack.url)
        self._metrics = SseClient(f"http://127.0.0.1:{metrics_port}") if metrics_port else None
        self._pids = {
            name: service.process.pid
            for name, service in stack.services.items()
            if service.process is not None
        }
        self._pids["client"] = os.getpid()

    def close(self) -> None:
        self._client.close()
        if self._metrics is not None:
            self._metrics.close()

    async def warm_up(self) -> int:
        """Sends one round of short outputs. Returns the tokens that each request asks for from now
        on.
        """
        self._output_tokens = length_for(await self._generate("warm-up"), self._settings.steps)
        return self._output_tokens

    async def measure(self, number: int) -> Answers:
        """Runs one round: all requests at once, to their ends."""
        samples: list[Sample] = []
        before, begun_s = self._cpu_s(), time.perf_counter()
        async with beside(self._watch(samples)):
            streams = await self._generate(str(number))
        after = self._cpu_s()
        window = window_of(streams, self._settings.prompt_tokens)
        prefill_s = max(events[0][0] for events in streams) - begun_s
        return Answers(
            prompt_tokens_per_s=self._settings.batch * self._settings.prompt_tokens / prefill_s,
            window=window,
            costs=costs_of(samples, window),
            cpu_s={name: after[name] - before[name] for name in after},
        )

    def _cpu_s(self) -> dict[str, float]:
        return {name: process_ran_s(pid) for name, pid in self._pids.items()}

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
        while self._metrics is not None:
            found = (await self._metrics.get("/metrics")).body.decode()
            name = "millrace_decode_step_seconds"
            samples.append(
                Sample(
                    at_s=time.perf_counter(),
                    steps=_value(found, f"{name}_count"),
                    step_s=_value(found, f"{name}_sum"),
                    cpu_s=self._cpu_s(),
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


def compute_threads(settings: Settings) -> int:
    """Returns the threads of the decode instance, and of the bare engine."""
    return StackOptions(model="", threads=settings.threads).compute_threads


def stack_options(
    model: Path, settings: Settings, chosen: Sequence[str], metrics_ports: Mapping[str, int]
) -> StackOptions:
    """Returns a stack of one prefill and one decode instance. metrics_ports: by role, if any."""
    threads = compute_threads(settings)
    own = {
        "prefill": [f"engine.threads={settings.prefill_threads or threads}"],
        "decode": [],
    }
    ports = {role: [f"telemetry.metrics_port={port}"] for role, port in metrics_ports.items()}
    return StackOptions(
        model=str(model),
        prefill=1,
        decode=1,
        port=0,
        threads=threads,
        settings=[f"engine.dtype={settings.dtype}", "proxy.max_new_tokens=32768", *chosen],
        role_settings={role: [*found, *ports.get(role, ())] for role, found in own.items()},
    )


def free_port() -> int:
    """Returns a port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
