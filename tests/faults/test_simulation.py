"""The whole fleet in one thread, with a fault at any event: every run keeps the promise.

What is simulated and what not: docs/design/faults.md. `make test-slow` runs RUNS seeds of instances
that stand in, and SERVICE_RUNS of the real ones, others each time; a failure prints its seed and
what is left of the run after shrinking. Put that into `simulated/` as a file of its own: it is
played again from then on.
"""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from millrace.core.kv.prefix import TokenBytes, block_hashes
from millrace.core.kv.sp_layout import Run as TokenRun
from millrace.core.request_spec import RequestSpec
from millrace.core.scheduler.fleet.instances import Instance
from millrace.core.scheduler.request_table import RequestTable
from millrace.decode.memory import prefix as decode_prefix
from millrace.decode.memory.preemption import Preemption
from millrace.decode.memory.swapping import Preempted
from millrace.decode.request import DecodeRequest
from millrace.engine.execution_pool import ExecutionPool
from millrace.engine.kv.host_swap import KvSwap
from millrace.engine.kv.prefix_cache import PrefixCache
from millrace.prefill import prefix as prefill_prefix
from millrace.proxy.errors import ApiError
from millrace.proxy.fleet.migration import Migration
from millrace.proxy.generation import proxy_request
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.text import prefix as proxy_prefix
from millrace.scheduler.succession import Succession
from millrace.transfer.push.receive.manager import ReceiveManager
from millrace.transfer.ring.flow import RingFlow
from support.fleet_sim import model, tokens
from support.fleet_sim.runs import Run, Setting, parse, replay, run, shrink

RUNS, SHARDS = 100_000, 100
SERVICE_RUNS = 20_000
FEW_RUNS, FEW_SHARDS = 320, 4  # in the default suite
FEW_SERVICE_RUNS = 100

TRANSCRIPTS = sorted((Path(__file__).parent / "simulated").glob("*.txt"))


@contextmanager
def quick() -> Iterator[None]:
    """Leaves what the modules hold to no collection: runs make much garbage."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def first_failure(seeds: Iterable[int], *, services: bool = False) -> Run | None:
    with quick():
        runs = (run(seed, services=services) for seed in seeds)
        return next((found for found in runs if found.failure is not None), None)


def check(seeds: range, *, services: bool = False) -> None:
    failed = first_failure(seeds, services=services)
    if failed is not None:
        least = shrink(failed)
        pytest.fail(
            f"seed {failed.setting.pauses}: {failed.failure}\n"
            f"{len(least.actions)} of {len(failed.actions)} actions are left, and fail by: "
            f"{least.failure}\n\n{least}",
            pytrace=False,
        )


@pytest.mark.parametrize("shard", range(FEW_SHARDS))
def test_runs_with_faults_at_any_event(shard: int) -> None:
    size = FEW_RUNS // FEW_SHARDS
    check(range(shard * size, (shard + 1) * size))


@pytest.mark.parametrize("shard", range(FEW_SHARDS))
def test_runs_of_groups_and_spread_requests(shard: int) -> None:
    size = FEW_SERVICE_RUNS // FEW_SHARDS
    check(range(shard * size, (shard + 1) * size), services=True)


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_many_runs_with_faults_at_any_event(shard: int, pytestconfig: pytest.Config) -> None:
    size = RUNS // SHARDS
    first = int(pytestconfig.getoption("--seed")) * RUNS + shard * size
    check(range(first, first + size))


@pytest.mark.slow
@pytest.mark.parametrize("shard", range(SHARDS))
def test_many_runs_of_groups_and_spread_requests(shard: int, pytestconfig: pytest.Config) -> None:
    size = SERVICE_RUNS // SHARDS
    first = int(pytestconfig.getoption("--seed")) * SERVICE_RUNS + shard * size
    check(range(first, first + size), services=True)


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_what_failed_once(path: Path) -> None:
    found = replay(*parse(path.read_text()))
    if found.failure is not None:
        raise found.failure


# ---- the simulation finds what it must find


def test_a_run_comes_again() -> None:
    first = run(7)
    assert str(run(7)) == str(first)
    again = replay(first.setting, first.actions)
    assert again.actions == first.actions
    assert parse(str(first)) == (first.setting, first.actions)


def test_a_run_of_the_real_services_comes_again() -> None:
    first = run(3, services=True)
    assert str(run(3, services=True)) == str(first)
    assert replay(first.setting, first.actions).actions == first.actions
    assert not torch.is_inference_mode_enabled()  # of the fibers alone, not of the tests' thread


def forget_tokens(
    spec: RequestSpec, request_id: str, generated: int, e2e_left_s: float | None = None
) -> RequestSpec:
    """A migration whose next incarnation begins with the first token again."""
    return replace(spec, request_id=request_id)


def free_at_once(
    table: RequestTable, step: object, request_id: str, instance: Instance, reason: object
) -> None:
    """An end of a request of which the instance hears nothing."""
    instance.release(request_id)


def give_up(migration: Migration, request: ProxyRequest, error: ApiError) -> None:
    """A prompt that was not read, and is not written again."""
    migration.move(request, error, "unread", wait_s=1e6)


def came(succession: Succession, *, worker_id: str = "", proxy_id: str = "") -> bool:
    """A takeover that waits for nobody else."""
    return succession.is_open


@pytest.mark.parametrize(
    ("owner", "name", "defect"),
    [
        (proxy_request, "continuation", forget_tokens),
        (RequestTable, "let_go", free_at_once),
        (Migration, "rewrite", give_up),
        (Succession, "came", came),
    ],
)
def test_a_defect_is_found_soon(owner: object, name: str, defect: Callable[..., object]) -> None:
    with patch.object(owner, name, defect):
        failed = first_failure(range(100))
        assert failed is not None


def test_a_block_of_a_ring_that_has_not_arrived_is_found_soon() -> None:
    with patch.object(RingFlow, "has_arrived", lambda flow, number: True):
        failed = first_failure(range(20), services=True)
        assert failed is not None and "have other K/V" in str(failed.failure)


def keep_unlanded(request: DecodeRequest) -> bool:
    """Decode caches pages in which nothing has landed."""
    return True


def keep_silently(cache: PrefixCache) -> None:
    """A registration after which the leader hears of new blocks alone."""


def any_pages(runs: Iterable[TokenRun], page_tokens: int) -> list[int]:
    """Pages of a member of a group, as if they were the prompt's first ones in order."""
    pages = [
        page
        for run in runs
        for page in range(
            run.slot // page_tokens, (run.slot + run.num_tokens - 1) // page_tokens + 1
        )
    ]
    return list(dict.fromkeys(pages))


def hash_alone(ids: TokenBytes, block_tokens: int, parent: int) -> list[int]:
    """Names of blocks that say nothing of the blocks before them."""
    view, step = memoryview(ids).cast("B"), 4 * block_tokens
    starts = range(0, len(view) - step + 1, step)
    return [block_hashes(view[at : at + step], block_tokens, 1)[0] for at in starts]


@pytest.mark.parametrize(
    ("owners", "name", "defect"),
    [
        ((DecodeRequest,), "has_kv", property(keep_unlanded)),
        ((PrefixCache,), "report_all", keep_silently),
        ((prefill_prefix,), "leading_pages", any_pages),
        ((proxy_prefix, decode_prefix, tokens, model), "block_hashes", hash_alone),
    ],
)
def test_a_defect_of_a_prefix_cache_is_found_soon(
    owners: tuple[object, ...], name: str, defect: object
) -> None:
    with ExitStack() as patches:
        for owner in owners:
            patches.enter_context(patch.object(owner, name, defect))
        assert first_failure(range(60), services=True) is not None


def test_a_prompt_that_its_batch_forgets_is_found_soon() -> None:
    take = ExecutionPool.take
    with patch.object(ExecutionPool, "take", lambda pool, *asked: take(pool, *asked)[:1]):
        assert first_failure(range(60), services=True) is not None


@pytest.mark.parametrize(
    ("owner", "name", "defect"),
    [
        (Preempted, "move_in", lambda preempted: None),  # it goes on with the pages that it had
        (KvSwap, "swap_in", lambda swap, slots, pages: None),
        (Preemption, "let_go", lambda preemption, request: True),  # and its host memory stays
    ],
)
def test_a_defect_of_growing_answers_is_found_soon(
    owner: object, name: str, defect: Callable[..., object]
) -> None:
    drawn = ((seed, Setting.drawn(seed, services=True)) for seed in range(600))
    seeds = [seed for seed, setting in drawn if setting.memory == "swap"]
    with patch.object(owner, name, defect):
        assert first_failure(seeds, services=True) is not None


def test_a_write_to_a_free_page_is_found_soon() -> None:
    """Decode frees pages without waiting for the writes that may still reach them."""
    release = ReceiveManager.release

    async def at_once(receiver: ReceiveManager, request_id: str) -> None:
        asyncio.get_running_loop().create_task(release(receiver, request_id))
        await asyncio.sleep(0)

    with patch.object(ReceiveManager, "release", at_once):
        failed = first_failure(range(60), services=True)
        assert failed is not None and "which is free" in str(failed.failure)


def test_what_is_left_of_a_failure_is_short_and_fails() -> None:
    with patch.object(proxy_request, "continuation", forget_tokens):
        failed = first_failure(range(12, 100))  # a run that fails early: shrinking takes long
        assert failed is not None
        least = shrink(failed)
        assert least.failure is not None
        assert len(least.actions) < len(failed.actions) / 2
        assert replay(*parse(str(least))).failure is not None
    assert replay(*parse(str(least))).failure is None
