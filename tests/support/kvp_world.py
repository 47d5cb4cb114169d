"""A KV owner and the KVP workers of its long requests in one process, with transports and pools."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from millrace.core.kv.kvp_pass import ExchangeShape, RemoteShard
from millrace.engine.attention.kvp_link import ExchangeLink
from millrace.engine.attention.kvp_memory import exchange_memory
from millrace.engine.attention.kvp_owner import Remote, reach_of
from millrace.engine.attention.kvp_worker import ShardAttention
from millrace.engine.decode_batch import DecodeBatch
from millrace.engine.decode_batch import Sequence as DecodeSequence
from millrace.engine.forward.local_runner import ModelRunner
from millrace.engine.forward.mixed_pass import NO_DECODES
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.forward.stage_passes import StagePasses
from millrace.engine.kv.step_tables import page_table_of
from millrace.engine.model.loader import Model, load_model
from millrace.engine.parallel.member_calls import MemberCalls
from millrace.engine.parallel.shard_ranks import MemberShards
from millrace.engine.runner import Runner
from millrace.engine.sampling.sampler import Sampler
from millrace.engine.sampling.spec import SamplingSpec
from millrace.transfer.kvp.exchange import KvpExchange
from millrace.transfer.kvp.server import KvpServer, ShardCompute
from millrace.transfer.transport.base import INLINE_BYTES, Transport
from millrace.transfer.transport.regions import Memory
from support.deadlines import HANG_S
from support.memory_transport import MemoryHub, MemoryTransport
from support.tiny_engine import Request, greedy, make_pool, make_runner
from support.tiny_models import prompt


def shape_of(model: Model, max_rows: int) -> ExchangeShape:
    return ExchangeShape(
        num_q_heads=model.config.num_heads,
        num_kv_heads=model.config.num_kv_heads,
        head_dim=model.config.head_dim,
        element_bytes=model.dtype.itemsize,
        max_rows=max_rows,
    )


class KvpWorker:
    """A KVP worker: pages and a server; K/V of prompts also comes by the exchange."""

    def __init__(
        self,
        name: str,
        model: Model,
        transport: Transport,
        *,
        page_tokens: int,
        max_rows: int,
        num_pages: int = 64,
        lease_s: float = 1.0,
        pools: int = 1,
        ranks: tuple[Runner, Sequence[MemberCalls]] | None = None,
        inline_bytes: int = INLINE_BYTES,
    ) -> None:
        """`pools`: pools that divide the heads, as ranks do. `ranks`: a runner whose members
        have pools of their own, and the ways to their attention, by stage."""
        self.name = name
        self.transport = transport
        shape = shape_of(model, max_rows)
        windows, nbytes = model.config.sliding_windows, KvpServer.memory_bytes(shape, 2)
        self.attention: ShardCompute
        if ranks is not None:
            runner, calls = ranks
            self.pool = runner.pool
            shards = MemberShards(runner.storage, shape, nbytes, windows, "auto", calls)
            self.attention, self.memory = shards, shards.memory
        else:
            self.pool = make_pool(model, page_tokens=page_tokens, num_pages=num_pages)
            self.memory = exchange_memory(nbytes)
            layers, pages, planes, heads, *rest = self.pool.storage.shape
            storage = torch.zeros(
                pools, layers, pages, planes, heads // pools, *rest, dtype=model.dtype
            )
            self.attention = ShardAttention(storage, shape, self.memory, windows)
        self.server = KvpServer(
            transport,
            Memory.of_tensor(self.memory),
            shape,
            self.attention,
            owners=2,
            lease_s=lease_s,
            inline_bytes=inline_bytes,
        )
        self.pages: dict[int, list[int]] = {}

    def open(self, start_token: int, end_token: int) -> int:
        pages = self.pool.allocate(self.pool.layout.pages_for(end_token - start_token))
        shard = self.server.open_shard(pages, start_token, end_token)
        self.pages[shard] = pages
        return shard

    def close_shard(self, shard: int) -> None:
        self.server.close_shard(shard).result(HANG_S)
        self.pool.free(self.pages.pop(shard))

    def check(self) -> None:
        self.server.check_integrity(idle=False)
        self.pool.check_integrity(sum(map(len, self.pages.values())))

    def close(self) -> None:
        self.server.close()
        self.transport.close()


class KvOwner:
    """A runner with an exchange to KVP workers."""

    def __init__(
        self,
        model: Model,
        transport: Transport,
        *,
        page_tokens: int,
        max_rows: int,
        spill_pages: int = 16,
        num_pages: int = 96,
        timeout_s: float = 20.0,
        runner: Runner | None = None,
        inline_bytes: int = INLINE_BYTES,
    ) -> None:
        self.transport = transport
        self.runner = runner or ModelRunner(
            StagePasses(model, make_pool(model, page_tokens=page_tokens, num_pages=num_pages))
        )
        shape = shape_of(model, max_rows)
        memory = exchange_memory(KvpExchange.memory_bytes(shape, 3))
        self.lost: dict[str, str] = {}
        self.exchange = KvpExchange(
            transport,
            Memory.of_tensor(memory),
            shape,
            workers=3,
            timeout_s=timeout_s,
            lease_s=1.0,
            on_lost=self.lost.__setitem__,
            inline_bytes=inline_bytes,
        )
        link = ExchangeLink(self.exchange, memory, model.dtype, page_tokens)
        pages = self.runner.pool.allocate(spill_pages)
        self.runner.remote = Remote(link, pages, reach_of(model.config.sliding_windows))

    async def attach(self, worker: KvpWorker) -> int:
        offer = self.exchange.offer()
        attachment = await worker.server.attach(
            metadata=self.transport.metadata(), region=offer.region, offset=offer.offset
        )
        await self.exchange.attach(
            worker.name,
            offer,
            metadata=worker.transport.metadata(),
            slot=attachment.slot,
            region=attachment.region,
            offset=attachment.offset,
        )
        return attachment.slot


class World:
    """One KV owner and `count` KVP workers, all attached."""

    def __init__(
        self,
        model: Model,
        count: int,
        *,
        page_tokens: int = 8,
        max_rows: int = 16,
        timeout_s: float = 20.0,
        runner: Runner | None = None,
        pools: int = 1,
        ranks: tuple[Runner, Sequence[MemberCalls]] | None = None,
        inline_bytes: int = INLINE_BYTES,
    ) -> None:
        """`pools` and `ranks`: of each KVP worker. `runner`: the KV owner's, over a pool of
        `page_tokens`."""
        hub = MemoryHub()
        sizes = {"page_tokens": page_tokens, "max_rows": max_rows, "inline_bytes": inline_bytes}
        self.page_tokens = page_tokens
        self.owner = KvOwner(
            model, MemoryTransport("owner", hub), timeout_s=timeout_s, runner=runner, **sizes
        )
        self.workers = [
            KvpWorker(
                f"worker-{i}",
                model,
                MemoryTransport(f"worker-{i}", hub),
                pools=pools,
                ranks=ranks,
                **sizes,
            )
            for i in range(count)
        ]
        self.slots = [asyncio.run(self.owner.attach(worker)) for worker in self.workers]

    @property
    def runner(self) -> Runner:
        return self.owner.runner

    def spread(
        self, ends: Sequence[int], workers: Sequence[KvpWorker] = ()
    ) -> tuple[RemoteShard, ...]:
        """Opens shards at the KVP workers, in order: from ends[0] to ends[1], and so on."""
        return tuple(
            RemoteShard(
                worker=worker.name,
                shard=worker.open(start, end),
                start_token=start,
                end_token=end,
            )
            for worker, start, end in zip(workers or self.workers, ends, ends[1:], strict=False)
        )

    def check(self) -> None:
        self.owner.exchange.check_integrity(idle=False)
        for worker in self.workers:
            worker.check()

    def close(self) -> None:
        for worker in self.workers:
            self.owner.exchange.detach(worker.name)
        for worker in self.workers:
            worker.close()
        self.owner.transport.close()


@contextmanager
def world(model: Model, count: int, **sizes: float) -> Iterator[World]:
    made = World(model, count, **sizes)  # type: ignore[arg-type]
    try:
        yield made
        made.check()
    finally:
        made.close()


class Long:
    """A spread request: its tokens, its pages at the KV owner, its shards."""

    def __init__(
        self,
        made: World,
        tokens: Sequence[int],
        ends: Sequence[int],
        workers: Sequence[KvpWorker] = (),
    ) -> None:
        """ends: of the KV owner's shard, and of each KVP worker's; none: the world's, in order."""
        self.tokens = list(tokens)
        self.pages = made.runner.pool.allocate(made.runner.pool.layout.pages_for(ends[0]))
        self.shards = made.spread(ends, workers)

    def task(self, start: int, stop: int, *, want_logits: bool = True) -> PrefillTask:
        return PrefillTask(
            token_ids=torch.tensor(self.tokens[start:stop]),
            history_tokens=start,
            pages=self.pages,
            want_logits=want_logits,
            shards=self.shards,
        )


def sequence_of(request: Long, request_id: str, first: int, tokens: int) -> DecodeSequence:
    """Makes a greedy sequence with its prompt in place; `first` is its first token of `tokens`."""
    return DecodeSequence(
        request_id=request_id,
        choice=0,
        pages=request.pages,
        prompt_tokens=len(request.tokens),
        first_token_id=first,
        spec=SamplingSpec(max_tokens=tokens, temperature=0.0),
        shards=request.shards,
    )


def prefill_long(runner: ModelRunner, request: Long, cuts: Sequence[int]) -> Tensor:
    """Returns logits float32 [vocab] of the last position, chunk by chunk between `cuts`."""
    bounds = [0, *cuts, len(request.tokens)]
    task = None
    for start, stop in pairwise(bounds):
        task = request.task(start, stop, want_logits=stop == bounds[-1])
        for _ in runner.prefill_batch([task]):
            pass
        assert not task.lost
    assert task is not None and task.logits is not None
    return task.logits


def random_cuts(rng: random.Random, length: int, count: int) -> list[int]:
    return sorted(rng.sample(range(1, length), count))


def check_holds_a_shard(folder: Path, worker: Runner, calls: Sequence[MemberCalls]) -> None:
    """A KVP worker whose members have pools of their own attends as the model of the folder does;
    then its shard is closed. `calls`: to its members, by stage.
    """
    steps, ids = 6, prompt(75, seed=1)
    wanted = make_runner(folder)
    (expected,) = greedy(wanted, [Request(wanted, ids, steps)], steps)
    model = load_model(folder, device="cpu")
    with world(model, 1, page_tokens=16, max_rows=9, ranks=(worker, calls)) as made:
        request = Long(made, ids, (32, 96))
        for start, stop in ((0, 40), (40, 75)):
            task = request.task(start, stop)
            made.runner.mixed(NO_DECODES, page_table_of([task.pages]), [task])
            assert not task.lost
        assert task.logits is not None and int(task.logits.argmax()) == expected[0]
        batch = DecodeBatch(made.runner, made.runner.pool, Sampler(), max_batch=4)
        batch.add(sequence_of(request, "r", expected[0], steps))
        assert [out.token_id for _ in expected[1:] for out in batch.step()] == expected[1:]
        made.workers[0].close_shard(request.shards[0].shard)
        late = request.task(75, 76, want_logits=False)
        late.token_ids = torch.tensor([expected[0]])
        made.runner.mixed(NO_DECODES, page_table_of([late.pages]), [late])
        assert late.lost
