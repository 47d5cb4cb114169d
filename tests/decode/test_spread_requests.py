"""A request whose KV is spread over its KV owner and KVP workers: live roles, the test schedules.

Tokens equal the model's. After any end of a request, a KVP worker or the owner, nothing is held.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from millrace.core.config import Config, SchedulerConfig
from millrace.core.scheduler.commands import Drain, KvShard
from millrace.decode.loop import DecodeRole
from millrace.engine.attention.kvp_worker import ShardAttention
from millrace.instance.role import WorkerContext
from millrace.kvp.role import KvpRole
from millrace.prefill.loop import PrefillRole
from support.deadlines import eventually
from support.memory_transport import MemoryHub
from support.role_pair import GatedStore, Pair, listening
from support.tiny_models import oracle, prompt
from support.worker_roles import (
    LiveRole,
    admit_decode,
    config,
    live_roles,
    remember,
    run_prefill,
    spec,
)

SETTINGS = replace(
    config(max_batch=4, max_chunk_tokens=64),
    scheduler=SchedulerConfig(heartbeat_s=0.1, lease_s=10),  # also the KVP workers' time limit
)
PAGE = SETTINGS.engine.page_tokens_on("cpu")


def kvp_role(context: WorkerContext) -> KvpRole:
    return KvpRole(context, context.engine)


class Spread:
    """A pair, and the instances that may hold shards for its decode instance."""

    def __init__(self, pair: Pair, workers: Sequence[LiveRole]) -> None:
        self.pair = pair
        self.workers = workers

    @property
    def used_pages(self) -> list[int]:
        """Lists the used pages of each KVP worker, without its own pages."""
        return [
            len([p for p in range(h.engine.pool.num_pages) if h.engine.pool.references(p)])
            - (h.role.num_spill_pages if h.role.name == "decode" else 0)
            for h in self.workers
        ]

    def shards(self, *ends: int) -> tuple[KvShard, ...]:
        """Cuts the KV owner's shard at the first end, and each KVP worker's at the next end."""
        starts = (0, *ends)
        members = [self.pair.decode.member, *(worker.member for worker in self.workers)]
        return tuple(
            KvShard(worker=member, start_token=start, end_token=end)
            for member, start, end in zip(members, starts, ends, strict=False)
        )

    async def admit(self, request_id: str, tokens: int, *ends: int, **sampling: Any) -> Any:
        request = spec(request_id, tokens, **sampling)
        await remember(self.pair.store, request, prompt(tokens))
        self.pair.decode.role.on_command(admit_decode(request, shards=self.shards(*ends)))
        return request

    async def ask(self, request_id: str, tokens: int, *ends: int, **sampling: Any) -> None:
        request = await self.admit(request_id, tokens, *ends, **sampling)
        command = run_prefill(request, self.pair.decode.member, shards=self.shards(*ends))
        self.pair.prefill.role.on_command(command)

    async def answered(self, request_id: str, tokens: int, new: int) -> None:
        """Checks that the answer has `new` tokens, equal to the model's own."""
        await self.pair.decode.said("request_finished", request_id)
        await eventually(lambda: (request_id, 0) in self.pair.ends)
        assert self.pair.tokens[request_id, 0] == oracle("llama").greedy(prompt(tokens), new)

    async def all_freed(self, *request_ids: str) -> None:
        for worker in self.workers:
            for request_id in request_ids:
                await worker.said("request_released", request_id)
        assert self.used_pages == [0] * len(self.workers)


@asynccontextmanager
async def spread(*builds: Any, settings: Config = SETTINGS) -> AsyncIterator[Spread]:
    """`settings`: of the decode instance."""
    store, hub = GatedStore(), MemoryHub()
    prefill = LiveRole(PrefillRole, SETTINGS, name="prefill-0", hub=hub, store=store)
    decode = LiveRole(DecodeRole, settings, name="decode-0", hub=hub, store=store)
    workers = [
        LiveRole(build, SETTINGS, name=f"worker-{i}", hub=hub, store=store)
        for i, build in enumerate(builds)
    ]
    async with live_roles(prefill, decode, *workers):
        pair = Pair(store, prefill, decode)
        async with listening(pair):
            yield Spread(pair, workers)


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[Spread]:
    async with spread(kvp_role, kvp_role) as made:
        yield made


async def test_tokens_are_the_models_over_an_owner_and_two_kvp_workers(scene: Spread) -> None:
    tokens, new = 5 * PAGE + 3, 2 * PAGE
    await scene.ask("r", tokens, 2 * PAGE, 4 * PAGE, tokens + new, max_tokens=new)
    await scene.answered("r", tokens, new)
    await scene.all_freed("r")


async def test_shards_behind_the_prompt_take_what_is_generated(scene: Spread) -> None:
    tokens, new = PAGE + 5, 3 * PAGE
    await scene.ask("r", tokens, 2 * PAGE, 3 * PAGE, tokens + new, max_tokens=new)
    await scene.answered("r", tokens, new)
    await scene.all_freed("r")


async def test_whole_and_spread_requests_share_steps(scene: Spread) -> None:
    await scene.pair.ask("whole", 21, max_tokens=40)
    await scene.ask("one", 70, 2 * PAGE, 4 * PAGE, 8 * PAGE, max_tokens=24)
    await scene.ask("two", 50, PAGE, 2 * PAGE, 6 * PAGE, max_tokens=30)
    await scene.answered("one", 70, 24)
    await scene.answered("two", 50, 30)
    await scene.answered("whole", 21, 40)
    await scene.all_freed("one", "two")


async def test_decode_instances_hold_shards_for_each_other() -> None:
    async with spread(DecodeRole, kvp_role) as scene:
        await scene.ask("r", 70, 2 * PAGE, 4 * PAGE, 8 * PAGE, max_tokens=24)
        await scene.answered("r", 70, 24)
        await scene.all_freed("r")


async def test_where_answers_grow_a_spread_request_waits_for_pages() -> None:
    grow = replace(SETTINGS.scheduler, decode_reserve="grow", decode_headroom_tokens=8)
    async with spread(kvp_role, settings=replace(SETTINGS, scheduler=grow)) as scene:
        pool = scene.pair.decode.engine.pool
        grown = pool.allocate(pool.free_pages - 3)  # by answers, unknown to the scheduler so far
        await scene.ask("r", 70, 4 * PAGE, 8 * PAGE, max_tokens=24)
        assert scene.pair.decode.kinds("r") == []
        assert scene.pair.decode.role.heartbeat().free_pages == 0  # r takes them first
        pool.free(grown)
        await scene.pair.ask("whole", 21, max_tokens=40)  # the instance looks for pages again
        await scene.answered("r", 70, 24)
        await scene.answered("whole", 21, 40)
        await scene.all_freed("r")


async def test_a_request_that_waits_for_pages_is_cancelled() -> None:
    grow = replace(SETTINGS.scheduler, decode_reserve="grow")
    async with spread(kvp_role, settings=replace(SETTINGS, scheduler=grow)) as scene:
        pool = scene.pair.decode.engine.pool
        grown = pool.allocate(pool.free_pages)
        await scene.admit("r", 70, 4 * PAGE, 8 * PAGE, max_tokens=24)
        scene.pair.decode.cancel("r")
        await scene.pair.decode.said("request_released", "r")
        pool.free(grown)
    assert scene.used_pages == [0]


async def test_a_kvp_worker_without_room_fails_the_request_before_it_begins(scene: Spread) -> None:
    worker = scene.workers[1]
    taken = worker.engine.pool.allocate(worker.engine.pool.free_pages)
    await scene.admit("r", 70, 2 * PAGE, 4 * PAGE, 8 * PAGE)
    failed = await scene.pair.decode.said("request_failed", "r")
    assert failed.retryable
    assert "worker-1" in failed.message and "KV pages wanted, 0 are free" in failed.message
    await scene.pair.decode.said("request_released", "r")
    for each in scene.workers:
        each.cancel("r")  # as the scheduler does: the owner may not have reached all
    worker.engine.pool.free(taken)
    await scene.all_freed("r")


async def test_a_cancelled_request_is_let_go_of_by_all(scene: Spread) -> None:
    await scene.admit("waits", 70, 2 * PAGE, 4 * PAGE, 8 * PAGE)
    await eventually(lambda: all(scene.used_pages))
    scene.pair.decode.cancel("waits")
    await scene.all_freed("waits")
    await scene.ask("runs", 70, 2 * PAGE, 4 * PAGE, 30 * PAGE, max_tokens=400)
    await scene.pair.decode.said("decode_started", "runs")
    scene.pair.decode.cancel("runs")
    await scene.all_freed("runs")


async def test_an_answer_whose_kvp_worker_goes_is_migrated(scene: Spread) -> None:
    await scene.ask("r", 70, 2 * PAGE, 4 * PAGE, 30 * PAGE, max_tokens=400)
    await scene.pair.ask("whole", 21, max_tokens=40)
    await scene.pair.decode.said("decode_started", "r")
    scene.workers[0].role.on_command(Drain())
    finished = await scene.pair.decode.said("request_finished", "r")
    assert finished.reason == "moved"
    got = scene.pair.tokens["r", 0]
    assert got == oracle("llama").greedy(prompt(70), len(got))
    await scene.answered("whole", 21, 40)
    await scene.all_freed("r")


async def test_a_lost_exchange_begins_again_though_a_request_waits(
    scene: Spread, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Sequence[int]:
        raise ValueError("no layer")

    ends = (2 * PAGE, 4 * PAGE, 8 * PAGE)
    await scene.admit("waits", 70, *ends)  # its prompt has not landed
    await eventually(lambda: all(scene.used_pages))
    with monkeypatch.context() as patched:
        patched.setattr(ShardAttention, "layer", fail)
        await scene.ask("r", 70, *ends, max_tokens=24)
        finished = await scene.pair.decode.said("request_finished", "r")
        assert finished.reason == "moved"
        failed = await scene.pair.decode.said("request_failed", "waits")
        assert failed.retryable and "no layer" in failed.message
    await scene.ask("again", 70, *ends, max_tokens=24)
    await scene.answered("again", 70, 24)
    await scene.all_freed("waits", "r", "again")


async def test_a_lost_kvp_worker_costs_its_requests_alone() -> None:
    async with spread(kvp_role, kvp_role) as scene:
        await scene.ask("r", 70, 2 * PAGE, 4 * PAGE, 30 * PAGE, max_tokens=400)
        await scene.pair.ask("whole", 21, max_tokens=40)
        await scene.pair.decode.said("decode_started", "r")
        await scene.workers[0].server.stop(grace=None)
        finished = await scene.pair.decode.said("request_finished", "r")
        assert finished.reason == "moved"
        await scene.answered("whole", 21, 40)
        await scene.all_freed("r")


async def test_the_scheduler_hears_when_a_cancelled_shard_is_free(scene: Spread) -> None:
    worker = scene.workers[0]
    worker.cancel("unknown")
    await worker.said("request_released", "unknown")
    await scene.admit("r", 70, 2 * PAGE, 4 * PAGE, 8 * PAGE)
    await eventually(lambda: all(scene.used_pages))
    worker.cancel("r")
    failed = await scene.pair.decode.said("request_failed", "r")
    assert failed.retryable and "the scheduler has cancelled it" in failed.message
    await scene.all_freed("r")
