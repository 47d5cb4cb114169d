"""Prefill-like nodes that move K/V inside groups: each number in a pool encodes its place."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from millrace.core.config import TransferConfig
from millrace.core.kv.layout import KvLayout
from millrace.core.kv.sp_layout import (
    PAD,
    RING_BUFFERS,
    ChunkShares,
    Layout,
    Run,
    buffer_of,
    layout,
)
from millrace.core.request import Chunk
from millrace.transfer.ring.manager import ChunkLink, GroupLink, PeerInfo, RingManager
from millrace.transfer.transport.base import Transport
from millrace.transfer.transport.regions import Memory

#: The content of pages that no request holds.
FREE = -1.0


def pool_layout(*, layers: int = 3, pages: int = 96, parts: int = 1) -> KvLayout:
    return KvLayout(
        model_hash="model-a",
        dtype="float32",
        num_layers=layers,
        num_kv_heads=2,
        head_dim=4,
        page_tokens=4,
        head_start=0,
        head_count=2,
        num_pages=pages,
        parts=parts,
    )


def chunks_of(tokens: Sequence[int], groups: Sequence[Sequence[str]], start: int = 0):
    """Makes chunks of these tokens, each on a group."""
    chunks = []
    for index, (count, group) in enumerate(zip(tokens, groups, strict=True)):
        chunks.append(
            Chunk(index=index, start_token=start, num_tokens=count, instance_ids=tuple(group))
        )
        start += count
    return chunks


@dataclass(eq=False)
class Job:
    """One request at one member."""

    request_id: str
    attempt: int
    seed: int
    laid: Layout
    pages: list[int]
    buffers: list[int]
    link: GroupLink | None = None
    aborted_by: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)


class RingNode:
    """A member of any groups. Its pool: float32 [parts, layers, pages, 2, heads, tokens, dim]."""

    def __init__(
        self, name: str, transport: Transport, made: KvLayout, config: TransferConfig
    ) -> None:
        self.name = name
        self.made = made
        self.transport = transport
        shape = (made.parts, made.num_layers, made.num_pages, 2, made.part_heads)
        self.pool = np.full((*shape, made.page_tokens, made.head_dim), FREE, dtype=np.float32)
        memory = self.pool.reshape(-1).view(np.uint8)
        self.region = transport.register(Memory.of_array(memory))
        self.manager = RingManager(transport, made, self.region, config)
        self.metadata = transport.metadata()
        order = random.Random(name).sample(range(made.num_pages), made.num_pages)
        self.free = order
        self._lock = threading.Lock()

    def prepare(
        self, request_id: str, chunks: Sequence[Chunk], seed: int, *, attempt=1, most_tokens=16
    ) -> tuple[Job, PeerInfo]:
        laid = layout(chunks, self.made.page_tokens, most_tokens)
        count = laid.pages[self.name]
        lent = RING_BUFFERS * laid.buffer_pages(self.made.num_layers)
        with self._lock:
            taken, self.free = self.free[: count + lent], self.free[count + lent :]
        assert len(taken) == count + lent, "the test's pool is too small"
        job = Job(request_id, attempt, seed, laid, taken[:count], sorted(taken[count:]))
        return job, PeerInfo(
            instance_id=self.name,
            peer=self.transport.name,
            region=self.region,
            pages=tuple(job.pages),
            buffer_pages=tuple(job.buffers),
            layout=self.made,
            generation=1,
        )

    def open(self, job: Job, roster: dict[str, PeerInfo]) -> None:
        peers = dict(roster)
        me = peers.pop(self.name)
        job.link = self.manager.open(job.request_id, job.attempt, me, peers, job.aborted_by.append)
        for shares in job.laid.chunks:
            job.link.exchange(shares)

    # -- compute

    def compute(self, job: Job, pause: Callable[[], None] = lambda: None) -> bool:
        """Computes all chunks as a prefill instance does. Returns False if it was aborted."""
        link = job.link
        assert link is not None
        for index, shares in enumerate(job.laid.chunks):
            if self.name not in shares.group:
                continue
            link.give(shares)
            if len(shares.group) == 1:
                for run in (run for one in shares.passes for run in one.runs[0]):
                    for layer in range(self.made.num_layers):
                        if not link.history(layer):
                            return False
                        self._fill(job, run, layer)
                continue
            chunk = link.chunk(shares, lambda call: call())
            for number in range(len(shares.passes)):
                if not self._pass(job, shares, chunk, number, pause, index):
                    return False
            chunk.end()
        return True

    def _pass(
        self,
        job: Job,
        shares: ChunkShares,
        chunk: ChunkLink,
        number: int,
        pause: Callable[[], None],
        index: int,
    ) -> bool:
        chunk.begin_pass(number)
        last = number == len(shares.passes) - 1 and index == len(job.laid.chunks) - 1
        for layer in range(self.made.num_layers):
            for run in shares.passes[number].runs[chunk.rank]:
                self._fill(job, run, layer)
            if layer == self.made.num_layers - 1 and not last:
                break  # no member wants rows of this pass
            if not chunk.history(layer):
                return False
            pause()
            chunk.publish(layer)
            for step in range(1, chunk.size):
                if not chunk.wait(step):
                    return False
                pause()
                self._check_block(job, shares, chunk, number, layer, step)
                chunk.release(step)
        return True

    def _check_block(self, job, shares, chunk, number, layer, step) -> None:
        origin = (chunk.rank - step) % chunk.size
        filled = shares.passes[number].filled[origin]
        each = len(job.buffers) // RING_BUFFERS
        lent = job.buffers[buffer_of(step) * each :][:each]
        count = -(-filled // self.made.page_tokens)
        memory = [(in_layer, page) for page in lent for in_layer in range(self.made.num_layers)]
        found = np.stack([self.pool[:, at, page] for at, page in memory[:count]]) if count else None
        positions = np.array(shares.shares[origin].positions[:filled])
        if found is not None:
            where = f"chunk {shares.chunk.index} pass {number} layer {layer} step {step}"
            self._check(job, found, positions, layer, where)

    # -- numbers

    def value(self, job_seed: int, layer: int, positions: np.ndarray) -> np.ndarray:
        """Returns [parts, 2, heads, tokens]."""
        made = self.made
        heads = np.arange(made.parts * 2 * made.part_heads).reshape(made.parts, 2, -1, 1)
        place = (job_seed * made.num_layers + layer) * 2048 + positions
        return (place * 8 + heads).astype(np.float32)

    def _fill(self, job: Job, run: Run, layer: int) -> None:
        tokens = np.arange(run.num_tokens)
        shares = next(
            shares
            for shares in reversed(job.laid.chunks)
            if self.name in shares.group and shares.chunk.start_token <= run.start_token
        )
        share = shares.shares[shares.group.index(self.name)]
        slots = run.slot + tokens
        pages = np.array(job.pages)[np.array(share.pages)[slots // self.made.page_tokens]]
        rows = slots % self.made.page_tokens
        values = self.value(job.seed, layer, run.start_token + tokens)
        self.pool[:, layer, pages, :, :, rows] = np.moveaxis(values, 3, 0)[..., None]

    def check_share(self, job: Job) -> None:
        """Checks the kept K/V of this member in all layers."""
        shares = job.laid.chunks[-1]
        share = shares.shares[shares.group.index(self.name)]
        pages = np.array(job.pages)[np.array(share.pages, dtype=int)]
        for layer in range(self.made.num_layers):
            found = np.moveaxis(self.pool[:, layer, pages], 1, 0)
            self._check(job, found, np.array(share.positions), layer, f"share, layer {layer}")

    def _check(self, job, found, positions, layer, where) -> None:
        """found: [pages, parts, 2, heads, tokens, dim]"""
        rows = np.moveaxis(found, 0, 3)  # [parts, 2, heads, pages, tokens, dim]
        rows = rows.reshape(*rows.shape[:3], -1, self.made.head_dim)[..., : len(positions), :]
        real = positions != PAD
        want = self.value(job.seed, layer, positions[real])[..., None]
        if not (rows[..., real, :] == want).all():
            job.wrong.append(f"{self.name}: wrong bytes in {where}")

    # -- the end

    def release(self, job: Job) -> None:
        """Frees and marks the pages. Call it after `close`."""
        pages = job.pages + job.buffers
        self.pool[:, :, pages] = FREE
        with self._lock:
            self.free += pages

    def check_free(self) -> None:
        """Checks that no late write landed in pages that no request holds."""
        assert (self.pool[:, :, self.free] == FREE).all(), f"{self.name}: a late write"


def random_pause(seed: int, most_s: float) -> Callable[[], None]:
    rng = random.Random(seed)
    return lambda: time.sleep(rng.random() * most_s) if rng.random() < 0.5 else None
