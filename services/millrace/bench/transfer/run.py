"""`millrace bench transfer`: requests' KV through handshake and NIXL, against bare NIXL writes.

Two processes on this machine, as prefill and decode are. First the rate, in two ways. *One request*
is all that a request costs by itself: a fresh handshake, its writes, their accounting. A *stream*
is what an instance moves in service: requests follow one another, a few of them in flight, each
with its own handshake. Beside each goes NIXL by itself with the same bytes of the same pages, one
write a request, as many in flight. The two take turns, so that other load hits both alike, and the
medians are compared. Then what layer-wise overlap hides: the layers' compute is a real matrix
product each; KV goes out as each layer ends, or all at the end, and the time that the last KV
lands after the last layer is what TTFT would see.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import uvloop

from millrace.bench.common.machine_limits import torch_threads
from millrace.bench.transfer.bare import BareWriter
from millrace.bench.transfer.command import Settings
from millrace.bench.transfer.load import LayerProduct
from millrace.bench.transfer.receiver import MIB, Expected, Receiver, receiver_process
from millrace.core.config import TransferConfig
from millrace.core.kv.layout import KvLayout
from millrace.core.token_events import FinishedPrefill
from millrace.engine.kv.pool import KvPool
from millrace.transfer.push.send.manager import SendManager, SendSession
from millrace.transfer.transport.layout import Side, at_layer, layer_runs
from millrace.transfer.transport.nixl.environment import transport_environment
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.transfer.transport.regions import Memory
from millrace.transfer.transport.runs import Runs
from millrace.wire.clients.kv_peer import KvPeers

LAYOUT = KvLayout(
    model_hash="bench",
    dtype="bfloat16",
    num_layers=32,
    num_kv_heads=8,
    head_dim=128,
    page_tokens=16,
    head_start=0,
    head_count=8,
    num_pages=1,
)
"""An 8B-class model's: 128 KiB a token, 64 KiB a page of a layer."""


#: A stream moves at least this much, and at least one request more than are in flight.
STREAM_MIB = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Medians, bytes/s: one request by itself, a stream of requests, and bare NIXL for each.

    A ratio is the median of those of the repetitions. `pages` is contiguous or scattered.
    """

    bytes: int
    pages: str
    mode: str
    handshake_ms: float
    one_bytes_per_s: float
    one_bare_bytes_per_s: float
    one_ratio: float
    stream_bytes_per_s: float
    stream_bare_bytes_per_s: float
    stream_ratio: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Overlap:
    """Milliseconds after the last layer's compute until all KV had landed, medians.

    `hidden` is the share of the exposed transfer time that overlap takes away.
    """

    bytes: int
    mode: str
    compute_ms: float
    at_end_ms: float
    layer_wise_ms: float
    hidden: float


def run(
    settings: Settings,
    *,
    on_progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Any]:
    """Measures everything and returns the report as one JSON-ready document.

    on_progress(done, total, what) is called before each repetition. Raises TransferError when a
    transfer fails.
    """
    for name, value in transport_environment("127.0.0.1").items():
        os.environ.setdefault(name, value)
    most_mib = max(settings.in_flight * max(settings.sizes_mib), settings.overlap_mib)
    tokens = most_mib * MIB // LAYOUT.bytes_per_token
    layout = replace(LAYOUT, num_pages=LAYOUT.pages_for(tokens))
    with torch_threads(settings.threads), receiver_process(layout) as receiver:
        bench = _Bench(layout, receiver, settings, on_progress)
        rates, overlaps = uvloop.run(bench.measure())
    return {
        "benchmark": "transfer",
        "cpus": os.cpu_count(),
        "threads": settings.threads,
        "layout": asdict(layout),
        "repeats": settings.repeats,
        "in_flight": settings.in_flight,
        "rates": [asdict(rate) for rate in rates],
        "overlap": [asdict(overlap) for overlap in overlaps],
    }


class _Bench:
    """The sending process. Both kinds of measurement share one pool and one transport."""

    def __init__(
        self,
        layout: KvLayout,
        receiver: Receiver,
        settings: Settings,
        on_progress: Callable[[int, int, str], None],
    ) -> None:
        self._layout = layout
        self._receiver = receiver
        self._settings = settings
        self._repeats = settings.repeats
        self._in_flight = settings.in_flight
        self._on_progress = on_progress
        self._sent = 0
        self._pool = KvPool(layout).storage.fill_(1)  # memory in use, as a prompt's is
        self._bare = BareWriter(Memory.of_tensor(self._pool), receiver.pool, receiver.bare_metadata)

    async def measure(self) -> tuple[list[Rate], list[Overlap]]:
        settings = self._settings
        transport = NixlTransport(f"bench-sender-{os.getpid()}")
        self._peers = KvPeers()
        self._manager = SendManager(
            transport=transport,
            layout=self._layout,
            storage=self._pool,
            identity=("bench-sender", 1),
            config=TransferConfig(),
        )
        cases = [
            (size * MIB, pages, mode)
            for size in settings.sizes_mib
            for pages, mode in (
                ("contiguous", "buffer-free"),
                ("scattered", "buffer-free"),
                ("contiguous", "buffered"),
                ("contiguous", "checked"),
                ("scattered", "checked"),
            )
        ]
        self._total = (len(cases) + len(self._receiver.addresses)) * self._repeats
        self._done = 0
        try:
            rates = [await self._rate(*case) for case in cases]
            product = LayerProduct(settings.layer_ms)
            overlaps = [
                await self._overlap(settings.overlap_mib * MIB, mode, product)
                for mode in self._receiver.addresses
            ]
        finally:
            await self._manager.close()
            await self._peers.close()
            await asyncio.to_thread(transport.close)
        return rates, overlaps

    async def _rate(self, nbytes: int, pages: str, mode: str) -> Rate:
        count = max(self._in_flight + 1, STREAM_MIB * MIB // nbytes)
        shapes = {"one": (1, 1), "stream": (count, self._in_flight)}
        ours: dict[str, list[float]] = {name: [] for name in shapes}
        bare: dict[str, list[float]] = {name: [] for name in shapes}
        handshakes: list[float] = []
        for repeat in range(self._repeats + 1):  # the first one warms up
            if repeat:
                self._step(f"{nbytes // MIB} MiB {pages} {mode}")
            for name, (requests, in_flight) in shapes.items():
                expected = self._requests(nbytes, pages, requests, in_flight)
                seconds, handshake_s = await self._send(expected, mode, in_flight)
                ours[name].append(requests * nbytes / seconds)
                bare[name].append(requests * nbytes / self._write_bare(expected, in_flight))
                if name == "one":
                    handshakes.append(handshake_s)
        found: dict[str, float] = {}
        for name in shapes:
            pairs = list(zip(ours[name][1:], bare[name][1:], strict=True))
            found[f"{name}_bytes_per_s"] = statistics.median(mine for mine, _ in pairs)
            found[f"{name}_bare_bytes_per_s"] = statistics.median(theirs for _, theirs in pairs)
            found[f"{name}_ratio"] = statistics.median(mine / theirs for mine, theirs in pairs)
        return Rate(
            bytes=nbytes,
            pages=pages,
            mode=mode,
            handshake_ms=1e3 * statistics.median(handshakes[1:]),
            **found,
        )

    async def _send(
        self, expected: Sequence[Expected], mode: str, in_flight: int
    ) -> tuple[float, float]:
        """Seconds until all requests were acknowledged, and of the last handshake."""
        self._receiver.ask("expect", mode, expected, in_flight)
        handshake_s = 0.0

        async def work(requests: Sequence[Expected]) -> None:
            nonlocal handshake_s
            for request in requests:
                session = await self._open(request, mode)
                self._all_ready(session, request)
                await session.finish(_finish())
                handshake_s = session.timings.handshake_s

        started_s = time.perf_counter()
        await asyncio.gather(*(work(expected[n::in_flight]) for n in range(in_flight)))
        seconds = time.perf_counter() - started_s
        await asyncio.to_thread(self._receiver.ask, "served")
        if mode == "checked":  # the receiver sums after the write was acknowledged
            seconds = time.perf_counter() - started_s
        return seconds, handshake_s

    def _write_bare(self, expected: Sequence[Expected], in_flight: int) -> float:
        runs: dict[int, Runs] = {}  # by first page: later requests use the same pages again
        for _, pages, tokens in expected:
            if pages[0] not in runs:
                side = Side.of(self._layout, pages, tokens)
                first = layer_runs(side, side, 0, tokens)
                layers = range(self._layout.num_layers)
                runs[pages[0]] = Runs.joined(
                    [at_layer(first, self._layout, self._layout, layer) for layer in layers]
                ).coalesced()
        self._receiver.ask("poll", True)
        seconds = self._bare.write([runs[pages[0]] for _, pages, _ in expected], in_flight)
        self._receiver.ask("poll", False)
        return seconds

    async def _overlap(self, nbytes: int, mode: str, product: LayerProduct) -> Overlap:
        exposed: dict[bool, list[float]] = {True: [], False: []}
        computes: list[float] = []
        for repeat in range(self._repeats + 1):
            if repeat:
                self._step(f"overlap {nbytes // MIB} MiB {mode}")
            for layer_wise in (False, True):
                (request,) = expected = self._requests(nbytes, "contiguous", 1, 1)
                self._receiver.ask("expect", mode, expected, 1)
                session = await self._open(request, mode)
                compute_s, after_s = await self._prefill(session, request, layer_wise, product)
                await asyncio.to_thread(self._receiver.ask, "served")
                if repeat:
                    exposed[layer_wise].append(after_s)
                    computes.append(compute_s)
        at_end, layer_wise_s = (statistics.median(exposed[k]) for k in (False, True))
        return Overlap(
            bytes=nbytes,
            mode=mode,
            compute_ms=1e3 * statistics.median(computes),
            at_end_ms=1e3 * at_end,
            layer_wise_ms=1e3 * layer_wise_s,
            hidden=1 - layer_wise_s / at_end,
        )

    async def _prefill(
        self, session: SendSession, request: Expected, layer_wise: bool, product: LayerProduct
    ) -> tuple[float, float]:
        """(seconds of compute, seconds from its end until every write was acknowledged)."""

        def compute() -> tuple[float, float]:
            started_s = time.perf_counter()
            for layer in range(self._layout.num_layers):
                product.compute()
                if layer_wise:
                    session.layer_ready(0, layer, 0, request[2])
            return time.perf_counter() - started_s, time.perf_counter()

        compute_s, ended_s = await asyncio.to_thread(compute)
        if not layer_wise:
            self._all_ready(session, request)
        await session.finish(_finish())
        return compute_s, time.perf_counter() - ended_s

    async def _open(self, request: Expected, mode: str) -> SendSession:
        request_id, pages, tokens = request
        return await self._manager.open(
            request_id,
            peer=self._peers.to(self._receiver.addresses[mode]),
            receiver=(mode, 1),
            prompt_tokens=tokens,
            pages=pages,
        )

    def _all_ready(self, session: SendSession, request: Expected) -> None:
        for layer in range(self._layout.num_layers):
            session.layer_ready(0, layer, 0, request[2])

    def _requests(self, nbytes: int, pages: str, count: int, in_flight: int) -> list[Expected]:
        """Requests of which `in_flight` have pages of their own, and the others follow them."""
        order = np.arange(self._layout.num_pages)
        if pages == "scattered":
            np.random.default_rng(1).shuffle(order)
        tokens = nbytes // self._layout.bytes_per_token
        size = self._layout.pages_for(tokens)
        places = [order[n * size : (n + 1) * size].tolist() for n in range(in_flight)]
        self._sent += count
        first = self._sent - count
        return [(f"request-{first + n}", places[n % in_flight], tokens) for n in range(count)]

    def _step(self, what: str) -> None:
        self._on_progress(self._done, self._total, what)
        self._done += 1


def _finish() -> FinishedPrefill:
    return FinishedPrefill(total_chunks=1)
