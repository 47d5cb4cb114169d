"""`millrace bench gateway`: measures the cost of the proxy alone, with a stub fleet.

The real proxy runs as its own process, with the real request store; a scheduler and a decode
instance in this process answer at once over gRPC. CPU is the proxy process's (user and system).
Latencies are the client's: they include the proxy, the store and gRPC, but no model.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

import orjson

from millrace.bench.common.options import Announce
from millrace.bench.common.sse_client import SseClient
from millrace.bench.common.thread_times import process_ran_s
from millrace.bench.gateway.command import Settings
from millrace.bench.gateway.long_prompts import measure
from millrace.bench.gateway.proxy_process import (
    CONTEXT_TOKENS,
    START_TIMEOUT_S,
    TEXT,
    Engine,
    started,
)
from millrace.core.errors import MillraceError
from millrace.core.span import Span
from millrace.core.token_events import TokenDetail
from millrace.wire.codec.token_events import encode_spans

#: Goals of the project: CPU in microseconds, and what long prompts may add to the 99th percentile
#: of the times between two tokens of other streams.
GOAL_REQUEST_US, GOAL_REQUEST_ALONE_US = 150.0, 300.0
GOAL_TOKEN_US = 20.0
GOAL_P99_GROWS_MS = 5.0

#: Streams beside the long prompts.
LONG_STREAMS = 16

_WARM_UP_REQUESTS = 200
_TURN_REQUESTS = 300  # short: the machine's speed changes from second to second
_TRACED_AT_ONCE = 32
#: What the instances report of a short prompt.
_BARS = tuple(
    Span(name=name, instance_id=where, start_s=number / 1e3, end_s=(number + 1) / 1e3)
    for number, (name, where) in enumerate(
        (
            ("queued", "scheduler"),
            ("cached", "decode-0"),
            ("waiting", "prefill-0"),
            ("kv_handshake", "prefill-0"),
            ("chunk 0", "prefill-0"),
            ("kv_transfer", "prefill-0"),
        )
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestCost:
    """The cost of unary chat requests of one token. CPU and latency are in microseconds."""

    concurrency: int
    requests: int
    cpu_us: float
    p50_us: float
    p99_us: float
    requests_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamCost:
    """The cost of concurrent streams of one token per step. `step_ms` 0: no pause between steps."""

    streams: int
    step_ms: float
    tokens: int
    cpu_us_per_token: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingCost:
    """CPU of unary requests in microseconds, and its ratio to that without traces in the turns
    beside: medians.
    """

    traces: str
    cpu_us: float
    ratio: float


class _Bench:
    """Measures one proxy process through its client."""

    def __init__(self, engine: Engine, pid: int, port: int, prompt: str) -> None:
        self._engine = engine
        self._pid = pid
        self._client = SseClient(f"http://127.0.0.1:{port}")
        self._message = {"model": "stub", "messages": [{"role": "user", "content": prompt}]}

    async def wait_ready(self) -> None:
        deadline = time.perf_counter() + START_TIMEOUT_S
        while (await self._client.get("/ready")).status != 200:
            if time.perf_counter() > deadline:
                raise MillraceError("the proxy did not become ready")
            await asyncio.sleep(0.05)

    async def requests(self, concurrency: int, count: int) -> RequestCost:
        body = orjson.dumps({**self._message, "max_tokens": 1})
        latencies: list[float] = []
        left = iter(range(count))

        async def one_after_another() -> None:
            for _ in left:
                response = await self._client.post("/v1/chat/completions", body)
                if response.status != 200:
                    raise MillraceError(f"status {response.status}: {bytes(response.body)!r}")
                latencies.append(response.ended_s - response.sent_s)

        cpu_s, began = self._cpu_s(), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(one_after_another())
        wall_s, cpu_s = time.perf_counter() - began, self._cpu_s() - cpu_s
        latencies.sort()
        return RequestCost(
            concurrency=concurrency,
            requests=count,
            cpu_us=cpu_s / count * 1e6,
            p50_us=latencies[count // 2] * 1e6,
            p99_us=latencies[count * 99 // 100] * 1e6,
            requests_per_s=count / wall_s,
        )

    async def streams(self, count: int, tokens: int, step_s: float) -> StreamCost:
        body = orjson.dumps({**self._message, "max_tokens": tokens, "stream": True})
        path = "/v1/chat/completions"
        async with asyncio.TaskGroup() as group:
            posts = [group.create_task(self._client.post(path, body)) for _ in range(count)]
            specs = await self._engine.arrived(count)
            cpu_s, began = self._cpu_s(), time.perf_counter()
            await self._engine.run_streams(specs, tokens, step_s)
        ended = max(post.result().ended_s for post in posts)
        cpu_s = self._cpu_s() - cpu_s
        for post in posts:
            # Beside the tokens: the opening chunk, the closing chunk and [DONE].
            if len(post.result().events) != tokens + 3:
                raise MillraceError(f"a stream had {len(post.result().events)} events")
        return StreamCost(
            streams=count,
            step_ms=step_s * 1e3,
            tokens=tokens * count,
            cpu_us_per_token=cpu_s / (tokens * count) * 1e6,
            tokens_per_s=tokens * count / (ended - began),
        )

    def close(self) -> None:
        self._client.close()

    def _cpu_s(self) -> float:
        return process_ran_s(self._pid)


async def run(settings: Settings, announce: Announce = lambda what: None) -> dict[str, Any]:
    """Measures and returns the document. Raises MillraceError for wrong answers."""
    characters = settings.prompt_characters
    prompt = (TEXT * (characters // len(TEXT) + 1))[:characters]
    if settings.tracing:
        costs = await _tracing(settings, prompt, announce)
        return {"prompt_characters": characters, "tracing": [asdict(cost) for cost in costs]}
    context_tokens = settings.long_tokens + CONTEXT_TOKENS
    async with started(settings.model, context_tokens=context_tokens) as (engine, pid, port):
        bench = _Bench(engine, pid, port, prompt)
        try:
            await bench.wait_ready()
            announce("warming up")
            await bench.requests(8, _WARM_UP_REQUESTS)
            unary = []
            for concurrency, share in ((1, 2), (32, 1)):
                announce(f"requests, {concurrency} at a time")
                unary.append(await bench.requests(concurrency, settings.requests // share))
            streamed = []
            for step_s in (0.025, 0.0):
                pace = "paced" if step_s else "as fast as they go"
                announce(f"{settings.streams} streams, {pace}")
                length = settings.tokens if step_s == 0 else settings.tokens // 4
                streamed.append(await bench.streams(settings.streams, length, step_s))
        finally:
            bench.close()
        long = []
        if settings.long_tokens:
            announce(f"prompts of {settings.long_tokens:,} tokens beside {LONG_STREAMS} streams")
            long.append(
                await measure(
                    engine,
                    pid,
                    port,
                    prompt_tokens=settings.long_tokens,
                    streams=LONG_STREAMS,
                    steps=settings.tokens,
                )
            )
    return {
        "prompt_characters": characters,
        "requests": [asdict(cost) for cost in unary],
        "streams": [asdict(cost) for cost in streamed],
        "long_prompts": [asdict(cost) for cost in long],
        "goals": {
            "cpu_us_per_request": GOAL_REQUEST_US,
            "cpu_us_per_request_alone": GOAL_REQUEST_ALONE_US,
            "cpu_us_per_token": GOAL_TOKEN_US,
            "p99_grows_ms": GOAL_P99_GROWS_MS,
        },
    }


async def _tracing(settings: Settings, prompt: str, announce: Announce) -> list[TracingCost]:
    """Compares proxies that take turns: without traces and without or with waterfalls, with the
    default sampling of traces, with all traces sampled. Spans go to files, waterfalls to Redis.
    """
    costs: dict[str, list[float]] = {}
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="millrace-traces-"))
        traced = f"telemetry.trace_folder={folder}"
        benches: dict[str, _Bench] = {}
        for name, overrides in (
            ("off, no waterfalls", ("telemetry.waterfall_bytes=0",)),
            ("off", ()),
            ("default", (traced,)),
            ("all sampled", (traced, "telemetry.trace_ratio=1")),
        ):
            proxy = await stack.enter_async_context(started(settings.model, overrides))
            proxy[0].detail = TokenDetail(spans=encode_spans(_BARS))
            benches[name] = _Bench(*proxy, prompt)
            stack.callback(benches[name].close)
        for bench in benches.values():
            await bench.wait_ready()
            await bench.requests(_TRACED_AT_ONCE, _WARM_UP_REQUESTS)
        turns = max(1, settings.requests // _TURN_REQUESTS)
        for turn in range(turns):
            announce(f"traces, turn {turn + 1} of {turns}")
            first = turn % len(benches)  # none is always first
            for name, bench in [*benches.items()][first:] + [*benches.items()][:first]:
                cost = await bench.requests(_TRACED_AT_ONCE, settings.requests // turns)
                costs.setdefault(name, []).append(cost.cpu_us)
    off = costs["off"]
    return [
        TracingCost(
            traces=name,
            cpu_us=statistics.median(found),
            ratio=statistics.median(one / base for one, base in zip(found, off, strict=True)),
        )
        for name, found in costs.items()
    ]
