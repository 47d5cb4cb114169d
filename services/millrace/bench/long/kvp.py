"""Measures a long context over several workers (KVP, Mnemosyne section 4.4): a pass's time and its
parts.

The KV owner is this process, the KVP workers are processes of their own, each computes on one
thread; the exchange uses NIXL as between instances. Shards are equal parts of the context, filled
with random numbers.

The workers share this machine's cores. So the report gives the measured time, and the time that a
pass would take if each worker had a core: CPU time of the KV owner outside attention, CPU time of
attention over the largest shard, and communication. Communication is measured over shards that are
nearly empty: the CPU time of the KV owner's attention operators without waits, and its measured
wait with one KVP worker, so that each has a core; with several KVP workers on cores of their own it
would wait for all at once.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch

from millrace.bench.common.options import Announce
from millrace.bench.long.model import kv_bytes
from millrace.bench.long.worker import LEASE_S, WorkerProcess, worker_processes
from millrace.core.arithmetic import ceil_div
from millrace.core.config import EngineConfig
from millrace.core.kv.kvp_pass import RemoteShard, Reply
from millrace.engine.assembly import Engine, open_engine
from millrace.engine.attention.kvp_link import ExchangeLink
from millrace.engine.attention.kvp_memory import exchange_memory
from millrace.engine.attention.kvp_owner import Remote, reach_of
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.instance.shards.shard_host import exchange_shape
from millrace.transfer.kvp.exchange import KvpExchange
from millrace.transfer.transport.nixl.environment import transport_environment
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.transfer.transport.regions import Memory

Document = dict[str, Any]

TIMEOUT_S = 30.0
#: Tokens of shards that leave only communication.
EMPTY_TOKENS = 16
#: Pages of every pool beyond the context, for K/V that the KV owner keeps until it is sent.
ROOM_TOKENS = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class PassTime:
    """Typical times of one pass."""

    wall_s: float
    wait_s: float  # seconds of waiting for KVP workers' answers
    operators_s: float  # CPU seconds of the KV owner's attention operators, without waits
    attention_s: float  # CPU seconds over the largest shard
    rest_s: float  # CPU seconds of the KV owner outside attention


class _Watched:
    """An exchange that counts the seconds its user has waited."""

    def __init__(self, exchange: KvpExchange) -> None:
        self._exchange = exchange
        self.shape = exchange.shape
        self.begin, self.at, self.post = exchange.begin, exchange.at, exchange.post
        self.wait_s = self.wait_cpu_s = 0.0

    def wait(self) -> Reply | None:
        begun_s, begun_cpu_s = time.perf_counter(), time.thread_time()
        reply = self._exchange.wait()
        self.wait_s += time.perf_counter() - begun_s
        self.wait_cpu_s += time.thread_time() - begun_cpu_s
        return reply


class KvOwner:
    """The KV owner's engine and its exchange with KVP workers."""

    def __init__(self, engine: Engine, workers: Sequence[WorkerProcess]) -> None:
        self._engine = engine
        self._workers = workers
        layout = engine.layout
        shape = exchange_shape(engine)
        memory = exchange_memory(KvpExchange.memory_bytes(shape, max(len(workers), 1)))
        self._transport = NixlTransport(f"kv-owner-{os.getpid()}")
        self._exchange = KvpExchange(
            self._transport,
            Memory.of_tensor(memory),
            shape,
            workers=max(len(workers), 1),
            timeout_s=TIMEOUT_S,
            lease_s=LEASE_S,
        )
        self._watched = _Watched(self._exchange)
        link = ExchangeLink(self._watched, memory, engine.pool.storage.dtype, layout.page_tokens)
        spill = engine.pool.allocate(layout.pages_for(shape.max_rows))
        engine.runner.remote = Remote(link, spill, reach_of(engine.shape.sliding_windows))
        self._pages = engine.pool.allocate(engine.pool.free_pages)
        engine.pool.storage.normal_()

    async def attach(self) -> None:
        for worker in self._workers:
            await worker.attach(self._exchange, self._transport.metadata())

    def close(self) -> None:
        for worker in self._workers:
            self._exchange.detach(worker.name)
        self._transport.close()

    def passes(
        self, ends: Sequence[int], tokens: int, context: int, repeats: int, warm: int = 1
    ) -> PassTime:
        """Computes the last `tokens` of `context` as a chunk. ends: of the shards, the KV owner's
        first; the last shard may end after the context.
        """
        shards = self._spread(ends, context - tokens)
        for _ in range(warm):
            self._pass(shards, tokens, context)
        self._attention_s(shards)
        found = [self._pass(shards, tokens, context) for _ in range(repeats)]
        at_workers_s = self._attention_s(shards) / repeats
        return PassTime(
            wall_s=median(one.wall_s for one in found),
            wait_s=median(one.wait_s for one in found),
            operators_s=median(one.operators_s for one in found),
            attention_s=at_workers_s or median(one.attention_s for one in found),
            rest_s=median(one.rest_s for one in found),
        )

    def recorded_s(self, context: int, repeats: int) -> float:
        """Returns seconds of a step of one sequence without shards, as a decode instance runs
        it.
        """
        pages = torch.tensor([self._pages[: self._engine.layout.pages_for(context)]])
        rows = (torch.zeros(1, dtype=torch.int64), torch.tensor([context - 1]))
        kv_lens = torch.tensor([context], dtype=torch.int32)
        times = []
        with torch.inference_mode():
            for _ in range(repeats + 2):  # the first step is recorded
                begun_s = time.perf_counter()
                self._engine.runner.decode(*rows, pages.int(), kv_lens)
                times.append(time.perf_counter() - begun_s)
        return median(times[2:])

    def _spread(self, ends: Sequence[int], kv_tokens: int) -> list[RemoteShard]:
        parts = zip(self._workers, pairwise(ends), strict=False)
        return [
            worker.hold(start, end, min(end, kv_tokens) - start) for worker, (start, end) in parts
        ]

    def _attention_s(self, shards: Sequence[RemoteShard]) -> float:
        """Returns CPU seconds of the busiest KVP worker since the last call."""
        return max((worker.attention_s() for worker in self._workers[: len(shards)]), default=0.0)

    @torch.inference_mode()
    def _pass(self, shards: Sequence[RemoteShard], tokens: int, context: int) -> PassTime:
        """attention_s: the KV owner's own."""
        own = shards[0].start_token if shards else context
        task = PrefillTask(
            token_ids=torch.zeros(tokens, dtype=torch.int64),
            history_tokens=context - tokens,
            pages=self._pages[: self._engine.layout.pages_for(own)],
            shards=shards,
        )
        cpu_s = {True: 0.0, False: 0.0}  # in attention, outside it
        watched = self._watched
        watched.wait_s = watched.wait_cpu_s = 0.0
        begun_s, last_cpu_s = time.perf_counter(), time.thread_time()
        for boundary in self._engine.runner.prefill_batch([task]):
            now_cpu_s = time.thread_time()
            cpu_s[boundary.operator == "attn"] += now_cpu_s - last_cpu_s
            last_cpu_s = now_cpu_s
        return PassTime(
            wall_s=time.perf_counter() - begun_s,
            wait_s=watched.wait_s,
            operators_s=cpu_s[True] - watched.wait_cpu_s,
            attention_s=cpu_s[True],
            rest_s=cpu_s[False],
        )


@contextmanager
def kv_owner(model: Path, *, dtype: str, context: int, degree: int) -> Iterator[KvOwner]:
    """Opens an engine for contexts of `context` tokens, and KVP workers for shards of up to half of
    it.
    """
    for name, value in transport_environment("127.0.0.1").items():
        os.environ.setdefault(name, value)
    room = context + ROOM_TOKENS
    config = EngineConfig(device="cpu", dtype=dtype, threads=1, kv_bytes=kv_bytes(room, dtype))
    holding = replace(config, kv_bytes=kv_bytes(room // 2, dtype))
    engine = open_engine(model, config)
    with worker_processes(degree - 1, model, holding) as workers:
        made = KvOwner(engine, workers)
        try:
            asyncio.run(made.attach())
            yield made
        finally:
            made.close()
            engine.close()


def token_times(
    at: KvOwner, contexts: Sequence[int], degrees: Sequence[int], repeats: int, announce: Announce
) -> list[Document]:
    """Measures the time between tokens of one request by its context and its number of workers."""
    waits_s = {degree: _communication_s(at, degree, 1, repeats) for degree in degrees}
    rows = []
    for context in contexts:
        announce(f"kvp: a token of a context of {context}")
        recorded_s = at.recorded_s(context, repeats)
        for degree in degrees:
            taken = at.passes(_equal(context, degree), 1, context, repeats)
            row = {"context": context, "kvp": degree, **_normalised(taken, waits_s[degree])}
            rows.append(row | ({"recorded_s": recorded_s} if degree == 1 else {}))
    return rows


def growth(
    at: KvOwner,
    contexts: Sequence[int],
    most_tokens: int,
    chunk_tokens: int,
    repeats: int,
    announce: Announce,
) -> list[Document]:
    """Measures the last chunk of growing contexts, as workers join so that none holds more than
    `most_tokens` (Mnemosyne Figure 19), and the same chunk where the KV owner holds all.
    """
    rows = []
    waits_s = {1: 0.0}
    for context in contexts:
        announce(f"kvp: workers join (a context of {context})")
        workers = ceil_div(context, most_tokens)
        if workers not in waits_s:
            waits_s[workers] = _communication_s(at, workers, chunk_tokens, repeats)
        ends = [most_tokens * (number + 1) for number in range(workers)]
        joined = at.passes(ends, chunk_tokens, context, repeats)
        alone = at.passes([context], chunk_tokens, context, repeats)
        rows.append(
            {
                "context": context,
                "workers": workers,
                **_normalised(joined, waits_s[workers]),
                "alone_s": alone.wall_s,
            }
        )
    return rows


def _equal(context: int, degree: int) -> list[int]:
    """Returns where each of `degree` shards ends."""
    return [context * (number + 1) // degree for number in range(degree)]


def _communication_s(at: KvOwner, degree: int, tokens: int, repeats: int) -> float:
    """Returns seconds of a pass's attention operators over nearly empty shards, for workers with
    cores of their own; 0 without KVP workers.
    """
    if degree == 1:
        return 0.0

    def over(workers: int) -> PassTime:
        context = tokens + EMPTY_TOKENS * workers
        return at.passes(_equal(context, workers), tokens, context, 2 * repeats, 2)

    return over(degree).operators_s + over(2).wait_s


def _normalised(taken: PassTime, communication_s: float) -> Document:
    return {
        "wall_s": taken.wall_s,
        "attention_s": taken.attention_s,
        "communication_s": communication_s,
        "rest_s": taken.rest_s,
        "normalised_s": taken.rest_s + taken.attention_s + communication_s,
    }
