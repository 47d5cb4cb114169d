"""Measures K/V round a ring of processes, without compute, against bare NIXL writes of the same
blocks.

Every member publishes layer after layer and takes each block as soon as it has arrived. The bare
writes carry the same bytes from and to the same pages: every member writes all its blocks to the
next member, two in flight, without waiting for others; each ends when its writes are done and all
blocks of the previous member have come. The ring and the bare writes take turns, so that other load
affects both equally, and the ratio is the median over the repetitions.
"""

from __future__ import annotations

import asyncio
import multiprocessing as mp
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any

from millrace.bench.transfer.ring_member import RingMember
from millrace.bench.transfer.run import LAYOUT
from millrace.core.errors import TransferError
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.sp_layout import RING_BUFFERS, Layout, layout
from millrace.core.request import Chunk
from millrace.transfer.transport.nixl.environment import transport_environment

MIB = 1 << 20
ANSWER_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RingRate:
    """Medians, bytes/s over all members together. ``block_bytes``: a layer of a member's share."""

    members: int
    block_bytes: int
    layers: int
    bytes_per_s: float
    bare_bytes_per_s: float
    ratio: float


def measure(
    *,
    members: Sequence[int] = (2, 4),
    block_mib: Sequence[int] = (16, 64),
    layers: int = 8,
    repeats: int = 5,
    kv: KvLayout = LAYOUT,
    on_progress: Callable[[str], None] = lambda what: None,
) -> list[RingRate]:
    """Measures every group size and block size. `kv` gives the shape of a page.

    Blocks are whole pages. on_progress(what) is called before each case. Raises TransferError when
    a transfer fails.
    """
    for name, value in transport_environment("127.0.0.1").items():
        os.environ.setdefault(name, value)
    rates = []
    for size in members:
        for mib in block_mib:
            on_progress(f"{size} members, blocks of {mib} MiB")
            pages = max(1, mib * MIB // kv.page_bytes)
            rates.append(_rate(size, pages, replace(kv, num_layers=layers), repeats))
    return rates


def _rate(size: int, pages: int, kv: KvLayout, repeats: int) -> RingRate:
    laid = _lay_out(size, pages, kv)
    lent = RING_BUFFERS * laid.buffer_pages(kv.num_layers)
    kv = replace(kv, num_pages=pages + lent)
    total = size * (size - 1) * kv.num_layers * pages * kv.page_bytes
    ours: list[float] = []
    bare: list[float] = []
    with _processes(size, kv, laid) as ring:
        for repeat in range(repeats + 1):  # the first one warms up
            for command, rates in (("exchange", ours), ("bare", bare)):
                spans = ring.ask(command, repeat)
                took_s = max(end for _, end in spans) - min(start for start, _ in spans)
                rates.append(total / took_s)
    pairs = list(zip(ours[1:], bare[1:], strict=True))
    return RingRate(
        members=size,
        block_bytes=pages * kv.page_bytes,
        layers=kv.num_layers,
        bytes_per_s=statistics.median(one for one, _ in pairs),
        bare_bytes_per_s=statistics.median(one for _, one in pairs),
        ratio=statistics.median(one / other for one, other in pairs),
    )


def _lay_out(size: int, pages: int, kv: KvLayout) -> Layout:
    """Lays out one pass of one chunk, after which every member has as many pages."""
    tokens = pages * kv.page_tokens
    group = tuple(f"member-{rank}" for rank in range(size))
    chunk = Chunk(index=0, start_token=0, num_tokens=size * tokens, instance_ids=group)
    return layout([chunk], kv.page_tokens, tokens)


class _Ring:
    """The members' processes, as the parent sees them."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes
        introduced = self._hear()
        for pipe in pipes:
            pipe.send(introduced)
        self._hear()

    def ask(self, *command: object) -> list[Any]:
        """Sends a command to all members at once. Returns their answers, by rank."""
        for pipe in self._pipes:
            pipe.send(command)
        return self._hear()

    def _hear(self) -> list[Any]:
        answers = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(ANSWER_TIMEOUT_S):
                raise TransferError(f"member {rank} of the ring did not answer in time")
            try:
                answers.append(pipe.recv())
            except EOFError as error:
                raise TransferError(f"member {rank} of the ring has ended") from error
        return answers


@contextmanager
def _processes(size: int, kv: KvLayout, laid: Layout) -> Iterator[_Ring]:
    context = mp.get_context("spawn")
    pipes, processes = [], []
    for rank in range(size):
        ours, theirs = context.Pipe()
        process = context.Process(target=_serve, args=(theirs, rank, kv, laid), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    try:
        yield _Ring(pipes)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _serve(pipe: Connection, rank: int, kv: KvLayout, laid: Layout) -> None:
    asyncio.run(_obey(pipe, RingMember(rank, kv, laid)))


async def _obey(pipe: Connection, member: RingMember) -> None:
    pipe.send(member.introduction)
    member.meet(pipe.recv())
    pipe.send("met")
    while True:
        command, repeat = await asyncio.to_thread(pipe.recv)
        pipe.send(await (member.exchange(repeat) if command == "exchange" else member.bare()))
