"""Runs one system as a live stack: one prefill and one decode instance, measured at the client."""

from __future__ import annotations

import asyncio
import itertools
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from millrace.bench.common.load_test import ServeOptions, run
from millrace.bench.common.options import Announce
from millrace.bench.common.report import RequestRecord
from millrace.bench.common.sse_client import SseClient
from millrace.bench.hol.systems import System
from millrace.bench.hol.traffic import Attainment, Traffic, Watch
from millrace.concurrency import beside
from millrace.core.errors import MillraceError
from millrace.local.options import StackOptions
from millrace.local.stack import Stack
from millrace.sim.workload.traces import TraceRow
from millrace.sim.workload.workload import SloClass, WorkloadOptions, plan

#: Requests that may transfer to decode at once: a suspended prompt keeps its place.
BACKENDS = 64

_LOOK_EVERY_S = 0.05
_IDLE_TIMEOUT_S = 60.0
_LONG, _SHORT = "long", "short"


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """The inputs of every stack of a run, with the profile for its scheduler's predictions.

    `token_ids`: valid ids of the model; None to ask the server.
    """

    model: str
    profile: Path
    dtype: str
    threads: int
    kv_bytes: int
    token_ids: tuple[int, int] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Interrupted:
    """Short prompts that arrived while a long prompt was computed; TTFTs in seconds."""

    isolated_s: float
    ttft_s: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Returns the median TTFT over the isolated TTFT."""
        return statistics.median(self.ttft_s) / self.isolated_s


class LiveSystem:
    """async with LiveSystem(system, served) as live: ..."""

    def __init__(self, system: System, served: Served, announce: Announce) -> None:
        self._system = system
        self._served = served
        self._announce = announce
        self._client: SseClient | None = None
        settings = [
            f"engine.dtype={served.dtype}",
            f"engine.kv_bytes={served.kv_bytes}",
            f"engine.profile={served.profile}",
            "engine.prefix_cache=off",  # every rate sends the same prompts
            f"transfer.backends={BACKENDS}",
            *system.settings,
        ]
        self._stack = Stack(
            StackOptions(
                model=served.model,
                prefill=1,
                decode=1,
                port=0,
                threads=served.threads,
                settings=settings,
            )
        )

    async def __aenter__(self) -> LiveSystem:
        self._announce(f"{self._system.name}: starting the stack")
        await self._stack.__aenter__()
        self._client = SseClient(self._stack.url)
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._client is not None:
            self._client.close()
        await self._stack.__aexit__(*raised)

    async def isolated_s(self, tokens: Mapping[str, int], repeats: int) -> dict[str, float]:
        """Returns median TTFTs in seconds of prompts alone in the stack, by name; they take
        turns.
        """
        self._announce(f"{self._system.name}: {', '.join(tokens)} alone")
        turns = itertools.cycle(
            TraceRow(arrival_s=None, input_tokens=count, output_tokens=1, class_name=name)
            for name, count in tokens.items()
        )
        found = await self._send(
            WorkloadOptions(
                open_arrivals=True,
                draw_row=lambda rng: next(turns),
                classes=[SloClass(name=name) for name in tokens],
                requests=repeats * len(tokens),
            ),
            concurrency=1,
        )
        good = _all_good(found)
        return {
            name: statistics.median(one.ttft_s for one in good if one.class_name == name)
            for name in tokens
        }

    async def attainment(self, traffic: Traffic, rate_rps: float, seed: int) -> Attainment:
        """Sends the traffic until the outcome is known. Then waits until the stack is idle."""
        options = traffic.at(rate_rps, seed)
        watch = Watch(planned=tuple(plan(options)))
        stop = asyncio.Event()
        begun_s = time.perf_counter()

        async def look() -> None:
            while not watch.is_over(now_s := time.perf_counter() - begun_s):
                self._announce(
                    f"{self._system.name}: {rate_rps:.3g} requests/s ({now_s:.0f} of "
                    f"{watch.planned[-1].arrival_s:.0f} s)"
                )
                await asyncio.sleep(_LOOK_EVERY_S)
            stop.set()

        async with beside(look()):
            await self._send(options, warmup=0, stop=stop, on_end=watch.end)
        found = watch.attainment(rate_rps, time.perf_counter() - begun_s)
        await self._idle()
        return found

    async def interrupted(
        self, *, long: tuple[int, float], short: tuple[int, float], repeats: int, seed: int
    ) -> Interrupted:
        """long, short: (tokens, objective in seconds). Short prompts arrive at random moments of
        the long prompt's first part, each after the previous one is done.
        """
        isolated_s = (await self.isolated_s({_SHORT: short[0]}, 2 * repeats))[_SHORT]
        long_s = (await self.isolated_s({_LONG: long[0]}, 1))[_LONG]
        rng = random.Random(f"{seed}/interrupted")
        ttft_s: list[float] = []
        while len(ttft_s) < repeats:
            self._announce(f"{self._system.name}: short prompts during a long one")
            rows = [TraceRow(arrival_s=0.0, input_tokens=long[0], output_tokens=1)]
            rows[0] = replace(rows[0], class_name=_LONG)
            at_s = 0.0
            while len(rows) - 1 < repeats - len(ttft_s):
                at_s += isolated_s * rng.uniform(2.0, 6.0)
                if at_s > 0.8 * long_s and len(rows) > 1:
                    break
                rows.append(
                    TraceRow(
                        arrival_s=at_s, input_tokens=short[0], output_tokens=1, class_name=_SHORT
                    )
                )
            found = await self._send(_one_by_one(rows, long[1], short[1]))
            ttft_s += [r.ttft_s for r in _all_good(found) if r.class_name == _SHORT]
        return Interrupted(isolated_s=isolated_s, ttft_s=tuple(ttft_s))

    async def _send(
        self,
        workload: WorkloadOptions,
        concurrency: int | None = None,
        warmup: int = 1,
        stop: asyncio.Event | None = None,
        on_end: Callable[[RequestRecord], None] = lambda record: None,
    ) -> list[RequestRecord]:
        options = ServeOptions(
            url=self._stack.url,
            workload=workload,
            concurrency=concurrency,
            token_ids=self._served.token_ids,
            warmup=warmup,
        )
        return await run(options, None, stop, on_end)

    async def _idle(self) -> None:
        """Waits for cancelled requests to leave the stack. Raises MillraceError."""
        assert self._client is not None  # within the context
        until_s = time.perf_counter() + _IDLE_TIMEOUT_S
        name = "millrace_proxy_inflight_requests{"
        while time.perf_counter() < until_s:
            text = bytes((await self._client.get("/metrics")).body).decode()
            found = [line for line in text.splitlines() if line.startswith(name)]
            values = [float(line.rsplit(maxsplit=1)[1]) for line in found]
            if not values:
                raise MillraceError(f"the gateway's metrics lack {name}")
            if not sum(values):
                await asyncio.sleep(2 * _LOOK_EVERY_S)  # for the instances to free them, too
                return
            await asyncio.sleep(_LOOK_EVERY_S)
        raise MillraceError(f"the stack was not idle within {_IDLE_TIMEOUT_S:g} s")


def _one_by_one(rows: Sequence[TraceRow], long_s: float, short_s: float) -> WorkloadOptions:
    classes = (SloClass(name=_LONG, ttft_s=long_s), SloClass(name=_SHORT, ttft_s=short_s))
    return WorkloadOptions(trace=rows, classes=classes, requests=len(rows))


def _all_good(records: Sequence[RequestRecord]) -> Sequence[RequestRecord]:
    for record in records:
        if record.error:
            raise MillraceError(f"a request failed: {record.error} ({record.detail})")
    return records
