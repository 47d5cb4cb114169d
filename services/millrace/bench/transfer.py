"""`millrace bench transfer`: a request's KV through handshake and NIXL, against a bare NIXL write.

Two processes on this machine, as prefill and decode are. First the rate: a whole request (its
handshake, one write a layer, accounting at the receiver) beside one bare NIXL write of as many
bytes in one piece; the two take turns, so that other load hits both alike, and the medians are
compared. Then what layer-wise overlap hides: the layers' compute is a real matrix product each;
KV goes out as each layer ends, or all at the end, and the time that the last KV lands after the
last layer is what TTFT would see.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing as mp
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from millrace.bench.transfer_load import LayerProduct
from millrace.bench.transfer_receiver import (
    ANSWER_TIMEOUT_S,
    BARE_RECEIVER,
    MIB,
    bare_agent,
    receive,
    region_rows,
)
from millrace.bench.transfer_report import as_tables
from millrace.core.config import TransferConfig
from millrace.core.errors import TransferError
from millrace.core.kv_layout import KvLayout
from millrace.engine.kv_pool import KvPool
from millrace.transfer.environment import transport_environment
from millrace.transfer.nixl_transport import NixlTransport
from millrace.transfer.send_manager import SendManager, SendSession
from millrace.wire.kv_peer import KvPeers
from millrace.wire.pb import transfer_pb2

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


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """Median bytes/s of both sides. `pages` is contiguous or scattered."""

    bytes: int
    pages: str
    mode: str
    kv_bytes_per_s: float
    bare_bytes_per_s: float
    handshake_ms: float
    ratio: float


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
    *,
    sizes_mib: Sequence[int] = (8, 64, 256),
    repeats: int = 5,
    overlap_mib: int = 64,
    layer_ms: float = 4.0,
    threads: int = 1,
    on_progress: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> dict[str, Any]:
    """Measures everything and returns the report as one JSON-ready document.

    on_progress(done, total, what) is called before each repetition. Raises TransferError when a
    transfer fails.
    """
    for name, value in transport_environment("127.0.0.1").items():
        os.environ.setdefault(name, value)
    tokens = max(*sizes_mib, overlap_mib) * MIB // LAYOUT.bytes_per_token
    layout = replace(LAYOUT, num_pages=LAYOUT.pages_for(tokens))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with _receiver_process(layout) as receiver:
            bench = _Bench(layout, receiver, repeats, on_progress)
            rates, overlaps = asyncio.run(bench.measure(sizes_mib, overlap_mib, layer_ms))
    finally:
        torch.set_num_threads(before)
    return {
        "benchmark": "transfer",
        "cpus": os.cpu_count(),
        "threads": threads,
        "layout": asdict(layout),
        "repeats": repeats,
        "rates": [asdict(rate) for rate in rates],
        "overlap": [asdict(overlap) for overlap in overlaps],
    }


class _Receiver:
    """The receiving process, seen from the sender's."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self.addresses: dict[str, str] = self.receive()
        self.bare_metadata, self.bare_pointer = self.receive()

    def receive(self) -> Any:  # noqa: ANN401 - whatever the child says
        if not self._pipe.poll(ANSWER_TIMEOUT_S):
            raise TransferError("the receiving process said nothing in time")
        return self._pipe.recv()

    def ask(self, *command: object) -> Any:  # noqa: ANN401
        self._pipe.send(command)
        return self.receive()


@contextmanager
def _receiver_process(layout: KvLayout) -> Iterator[_Receiver]:
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(theirs, layout), daemon=True)
    process.start()
    try:
        yield _Receiver(ours)
    finally:
        process.kill()
        process.join()


class _Bench:
    """The sending process. Both kinds of measurement share one pool and one transport."""

    def __init__(
        self,
        layout: KvLayout,
        receiver: _Receiver,
        repeats: int,
        on_progress: Callable[[int, int, str], None],
    ) -> None:
        self._layout = layout
        self._receiver = receiver
        self._repeats = repeats
        self._on_progress = on_progress
        self._requests = 0
        self._pool = KvPool(layout).storage.fill_(1)  # memory in use, as a prompt's is
        self._bare = _BareWriter(self._pool, receiver)

    async def measure(
        self, sizes_mib: Sequence[int], overlap_mib: int, layer_ms: float
    ) -> tuple[list[Rate], list[Overlap]]:
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
            for size in sizes_mib
            for pages, mode in (
                ("contiguous", "buffer-free"),
                ("scattered", "buffer-free"),
                ("contiguous", "buffered"),
            )
        ]
        self._total = (len(cases) + len(self._receiver.addresses)) * self._repeats
        self._done = 0
        try:
            rates = [await self._rate(*case) for case in cases]
            product = LayerProduct(layer_ms)
            overlaps = [
                await self._overlap(overlap_mib * MIB, mode, product)
                for mode in self._receiver.addresses
            ]
        finally:
            await self._manager.close()
            await self._peers.close()
            await asyncio.to_thread(transport.close)
        return rates, overlaps

    async def _rate(self, nbytes: int, pages: str, mode: str) -> Rate:
        ours: list[float] = []
        bare: list[float] = []
        handshakes: list[float] = []
        for repeat in range(self._repeats + 1):  # the first one warms up
            if repeat:
                self._step(f"{nbytes // MIB} MiB {pages} {mode}")
            request = self._admit(nbytes, pages, mode)
            started_s = time.perf_counter()
            session = await self._open(request, nbytes, pages, mode)
            for layer in range(self._layout.num_layers):
                session.layer_ready(0, layer, 0, self._tokens(nbytes))
            await session.finish(_finish())
            ours.append(time.perf_counter() - started_s)
            handshakes.append(session.timings.handshake_s)
            self._receiver.ask("landed", mode, request)
            bare.append(self._bare.write(nbytes))
        seconds, bare_seconds = statistics.median(ours[1:]), statistics.median(bare[1:])
        return Rate(
            bytes=nbytes,
            pages=pages,
            mode=mode,
            kv_bytes_per_s=nbytes / seconds,
            bare_bytes_per_s=nbytes / bare_seconds,
            handshake_ms=1e3 * statistics.median(handshakes[1:]),
            ratio=bare_seconds / seconds,
        )

    async def _overlap(self, nbytes: int, mode: str, product: LayerProduct) -> Overlap:
        exposed: dict[bool, list[float]] = {True: [], False: []}
        computes: list[float] = []
        for repeat in range(self._repeats + 1):
            if repeat:
                self._step(f"overlap {nbytes // MIB} MiB {mode}")
            for layer_wise in (False, True):
                request = self._admit(nbytes, "contiguous", mode)
                session = await self._open(request, nbytes, "contiguous", mode)
                compute_s, after_s = await self._prefill(session, nbytes, layer_wise, product)
                self._receiver.ask("landed", mode, request)
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
        self, session: SendSession, nbytes: int, layer_wise: bool, product: LayerProduct
    ) -> tuple[float, float]:
        """(seconds of compute, seconds from its end until every write was acknowledged)."""
        layers = range(self._layout.num_layers)

        def compute() -> tuple[float, float]:
            started_s = time.perf_counter()
            for layer in layers:
                product.compute()
                if layer_wise:
                    session.layer_ready(0, layer, 0, self._tokens(nbytes))
            return time.perf_counter() - started_s, time.perf_counter()

        compute_s, ended_s = await asyncio.to_thread(compute)
        if not layer_wise:
            for layer in layers:
                session.layer_ready(0, layer, 0, self._tokens(nbytes))
        await session.finish(_finish())
        return compute_s, time.perf_counter() - ended_s

    def _admit(self, nbytes: int, pages: str, mode: str) -> str:
        self._requests += 1
        request = f"request-{self._requests}"
        self._receiver.ask("admit", mode, request, self._pages(nbytes, pages), self._tokens(nbytes))
        return request

    async def _open(self, request: str, nbytes: int, pages: str, mode: str) -> SendSession:
        return await self._manager.open(
            request,
            peer=self._peers.to(self._receiver.addresses[mode]),
            receiver=(mode, 1),
            prompt_tokens=self._tokens(nbytes),
            pages=self._pages(nbytes, pages),
        )

    def _tokens(self, nbytes: int) -> int:
        return nbytes // self._layout.bytes_per_token

    def _pages(self, nbytes: int, pages: str) -> list[int]:
        order = np.arange(self._layout.num_pages)
        if pages == "scattered":
            np.random.default_rng(1).shuffle(order)
        found: list[int] = order[: self._layout.pages_for(self._tokens(nbytes))].tolist()
        return found

    def _step(self, what: str) -> None:
        self._on_progress(self._done, self._total, what)
        self._done += 1


class _BareWriter:
    """NIXL by itself between the same two pools: one descriptor, one write, a loop that waits."""

    def __init__(self, pool: torch.Tensor, receiver: _Receiver) -> None:
        self._receiver = receiver
        self._pointer = pool.data_ptr()
        self._agent = bare_agent("bench-bare-sender")
        self._agent.register_memory(region_rows(self._pointer, pool.nbytes), "DRAM")
        self._agent.add_remote_agent(receiver.bare_metadata)

    def write(self, nbytes: int) -> float:
        """Seconds for `nbytes` in one piece."""
        self._receiver.ask("poll", True)
        started_s = time.perf_counter()
        handle = self._agent.initialize_xfer(
            "WRITE",
            self._agent.get_xfer_descs(region_rows(self._pointer, nbytes), "DRAM"),
            self._agent.get_xfer_descs(region_rows(self._receiver.bare_pointer, nbytes), "DRAM"),
            BARE_RECEIVER,
            b"done",
        )
        state = self._agent.transfer(handle)
        while state == "PROC":
            state = self._agent.check_xfer_state(handle)
        elapsed_s = time.perf_counter() - started_s
        handle.release()
        self._receiver.ask("poll", False)
        if state != "DONE":
            raise TransferError(f"the bare NIXL write failed: {state}")
        return elapsed_s


def _finish() -> transfer_pb2.FinishPrefillRequest:
    return transfer_pb2.FinishPrefillRequest(total_chunks=1)


def command(
    sizes: Annotated[
        str, typer.Option("--sizes", metavar="MIB", help="KV sizes in MiB, comma-separated.")
    ] = "8,64,256",
    repeats: Annotated[
        int, typer.Option("--repeats", min=1, help="Repetitions; medians are reported.")
    ] = 5,
    overlap: Annotated[
        int, typer.Option("--overlap", min=1, metavar="MIB", help="KV size of the overlap test.")
    ] = 64,
    layer_ms: Annotated[
        float, typer.Option("--layer-ms", min=0.01, help="Compute of a layer, milliseconds.")
    ] = 4.0,
    threads: Annotated[int, typer.Option("--threads", min=1, help="Compute threads.")] = 1,
    json_path: Annotated[
        Path | None, typer.Option("--json", metavar="PATH", help="Write the report as JSON.")
    ] = None,
) -> None:
    """KV transfer between two processes: rate against a bare NIXL write, and what overlap hides."""
    try:
        sizes_mib = [int(part) for part in sizes.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{sizes!r} is no list of whole numbers like 8,64") from error
    if min(sizes_mib) < 1:
        raise typer.BadParameter(f"{sizes!r}: every size must be at least 1")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True)) as progress:
        bar = progress.add_task("starting", total=None)
        report = run(
            sizes_mib=sizes_mib,
            repeats=repeats,
            overlap_mib=overlap,
            layer_ms=layer_ms,
            threads=threads,
            on_progress=lambda done, total, what: progress.update(
                bar, completed=done, total=total, description=what
            ),
        )
        progress.update(bar, description="done")
    for table in as_tables(report):
        Console().print(table)
    if json_path is not None:
        json_path.write_text(json.dumps(report, indent=2) + "\n")
