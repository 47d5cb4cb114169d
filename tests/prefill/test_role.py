"""A prefill instance beside a decode instance: its reports, and what it releases at every end of a
request at every stage.
"""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import pytest
import pytest_asyncio

from millrace.core.scheduler.commands import Drain
from millrace.prefill.loop import PrefillRole
from millrace.state.store import StoreError
from support.deadlines import HANG_S, eventually
from support.memory_transport import MemoryHub
from support.role_pair import SETTINGS, GatedStore, Pair, live_pair
from support.tiny_models import prompt
from support.worker_roles import (
    LiveRole,
    admit_decode,
    order,
    remember,
    run_prefill,
    spec,
)


@pytest_asyncio.fixture
async def pair() -> AsyncIterator[Pair]:
    async with live_pair(SETTINGS) as made:
        yield made
        await made.prefill.role.drop_all("the test is over")
        assert made.prefill.role.heartbeat().waiting == 0
        made.prefill.role.check_integrity()


async def test_a_request_is_computed_handed_over_and_released(pair: Pair) -> None:
    await pair.ask("r", 200)

    await pair.prefill.said("request_released", "r")
    await pair.decode.said("request_finished", "r")

    assert pair.prefill.kinds("r") == ["chunk_started", "chunk_finished", "request_released"]
    assert pair.decode.kinds("r")[-2:] == ["decode_started", "request_finished"]
    assert pair.prefill.engine.pool.used_pages == 0
    text = pair.prefill.registry.render()[0].decode()
    assert "millrace_prefill_computed_tokens_total 200.0" in text
    assert "millrace_prefill_computed_chunks_total 1.0" in text
    assert "millrace_prefill_compute_seconds_count 4.0" in text
    assert "millrace_prefill_handshake_seconds_count 1.0" in text


async def test_cancelled_before_its_prompt_was_read(pair: Pair) -> None:
    pair.store.gate.clear()
    await pair.ask("r", 50)
    await eventually(lambda: pair.store.asked)
    pair.prefill.cancel("r")

    await pair.prefill.said("request_released", "r", 5)
    assert pair.prefill.kinds("r") == ["request_released"]


async def test_cancelled_in_the_moment_it_came(pair: Pair) -> None:
    await pair.ask("r", 50)
    pair.prefill.cancel("r")  # the job's task has not begun

    await pair.prefill.said("request_released", "r", 5)
    assert pair.prefill.kinds("r") == ["request_released"]


async def test_cancelled_while_it_waits_for_pages(pair: Pair) -> None:
    held = pair.prefill.engine.pool.allocate(pair.prefill.engine.pool.free_pages)
    await pair.ask("r", 50)
    await asyncio.sleep(0.02)
    pair.prefill.cancel("r")

    await pair.prefill.said("request_released", "r", 5)
    pair.prefill.engine.pool.free(held)


async def test_a_prepared_request_is_cancelled_while_another_computes(pair: Pair) -> None:
    with pair.prefill.held_before_the_last_chunk():
        await pair.ask("long", 300)
        await pair.prefill.said("chunk_started", "long")
        before = pair.prefill.engine.pool.used_pages
        await pair.ask("next", 100)
        await eventually(lambda: pair.prefill.engine.pool.used_pages > before)
        pair.prefill.cancel("next")

        await pair.prefill.said("request_released", "next", 5)
        assert pair.prefill.engine.pool.used_pages == before
        pair.prefill.cancel("long")
        await pair.prefill.said("request_released", "long", 5)
    assert "chunk_finished" not in pair.prefill.kinds("long")


async def test_cancelled_while_the_handshake_hangs(pair: Pair) -> None:
    await pair.ask("r", 50, admit=False)  # decode waits for the scheduler's command
    await pair.prefill.said("chunk_finished", "r")
    await asyncio.sleep(0.1)
    assert "request_released" not in pair.prefill.kinds("r")
    pair.prefill.cancel("r")

    await pair.prefill.said("request_released", "r", 5)
    assert "request_failed" not in pair.prefill.kinds("r")


async def test_the_next_request_waits_for_pages_and_goes_on(pair: Pair) -> None:
    pool = pair.prefill.engine.pool
    held = pool.allocate(pool.free_pages - 3)
    await pair.ask("first", 48)
    await pair.ask("second", 48)
    await pair.ask("third", 20)

    for name in ("first", "second", "third"):
        await pair.prefill.said("request_released", name)
    assert pair.started() == ["first", "second", "third"]
    pool.free(held)


async def test_those_who_wait_go_as_told_and_who_computes_is_not_interrupted(pair: Pair) -> None:
    with pair.prefill.held_before_the_last_chunk():
        await pair.ask("long", 300)
        await pair.prefill.said("chunk_started", "long")
        for name in ("a", "b", "c"):
            await pair.ask(name, 20)
        await eventually(lambda: pair.prefill.has_shaken_hands("c"))
        pair.prefill.role.on_command(order("c", "gone", "long", "b", "c", "a"))

    for name in ("a", "b", "c"):
        await pair.prefill.said("request_released", name)
    assert pair.started() == ["long", "c", "b", "a"]
    said = [(kind, m.request_id) for kind, m in pair.prefill.messages]
    assert said.index(("chunk_finished", "long")) < said.index(("chunk_started", "c"))


async def test_later_commands_queue_up_behind_an_order(pair: Pair) -> None:
    with pair.prefill.held_before_the_last_chunk():
        await pair.ask("long", 300)
        await pair.prefill.said("chunk_started", "long")
        await pair.ask("a", 20)
        await pair.ask("b", 20)
        pair.prefill.role.on_command(order("long", "b", "a"))
        await pair.ask("c", 20)
        await eventually(lambda: pair.prefill.has_shaken_hands("c"))

    for name in ("a", "b", "c"):
        await pair.prefill.said("request_released", name)
    assert pair.started() == ["long", "b", "a", "c"]


async def test_jobs_are_prepared_in_the_order_told(pair: Pair) -> None:
    pair.store.gate.clear()
    for name in ("a", "b", "c"):
        await pair.ask(name, 20)
    await eventually(lambda: pair.store.asked)
    pair.prefill.role.on_command(order("c", "b", "a"))
    pair.store.gate.set()

    for name in ("a", "b", "c"):
        await pair.prefill.said("request_released", name)
    assert pair.store.read == ["a", "c", "b"]  # a was being prepared already


async def test_a_job_that_is_next_and_not_prepared_holds_up_none_that_is(pair: Pair) -> None:
    with pair.prefill.held_before_the_last_chunk():
        await pair.ask("long", 300)
        await pair.prefill.said("chunk_started", "long")
        await pair.ask("ready", 20)
        await eventually(lambda: pair.prefill.has_shaken_hands("ready"))
        pair.store.gate.clear()
        await pair.ask("next", 20)
        pair.prefill.role.on_command(order("long", "next", "ready"))

    await pair.prefill.said("request_released", "ready")
    pair.store.gate.set()
    await pair.prefill.said("request_released", "next")
    assert pair.started() == ["long", "ready", "next"]


async def test_a_job_that_waits_for_pages_lets_those_go_first_that_are_told_to(pair: Pair) -> None:
    pool = pair.prefill.engine.pool
    held = pool.allocate(pool.free_pages - 3)
    await pair.ask("large", 160)
    await pair.ask("small", 20)
    await asyncio.sleep(0.02)
    assert pair.started() == []
    pair.prefill.role.on_command(order("small", "large"))

    await pair.prefill.said("request_released", "small")
    assert pair.started() == ["small"]
    pool.free(held)
    await pair.ask("another", 20)  # its release lets the large request check again
    pair.prefill.role.on_command(order("another", "large"))
    await pair.prefill.said("request_released", "large")


async def test_cancelled_while_others_go_before_it_for_pages(pair: Pair) -> None:
    pool = pair.prefill.engine.pool
    held = pool.allocate(pool.free_pages)
    await pair.ask("a", 160)
    await pair.ask("b", 20)
    await asyncio.sleep(0.02)
    pair.prefill.role.on_command(order("b", "a"))
    await asyncio.sleep(0.02)  # now b has the turn to be prepared
    pair.prefill.cancel("a")
    await pair.prefill.said("request_released", "a", 5)
    pair.prefill.cancel("b")
    await pair.prefill.said("request_released", "b", 5)
    pool.free(held)
    await pair.ask("c", 20)
    await pair.prefill.said("request_released", "c")


async def test_a_prompt_larger_than_the_pool_fails_at_once(pair: Pair) -> None:
    pages = pair.prefill.engine.pool.num_pages
    await pair.ask("r", pages * 16 + 1, admit=False)

    failed = await pair.prefill.said("request_failed", "r")
    assert failed.retryable and not failed.fault
    await pair.prefill.said("request_released", "r")


async def test_a_store_out_of_reach_gives_the_request_back_to_its_proxy(pair: Pair) -> None:
    pair.store.error = StoreError("no server")
    await pair.ask("r", 20)

    failed = await pair.prefill.said("request_failed", "r")
    await pair.prefill.said("request_released", "r")
    assert failed.retryable and failed.prompt_unread and not failed.fault
    assert "no server" in failed.message
    assert b'failed_requests_total{reason="store"} 1.0' in pair.prefill.registry.render()[0]


async def test_a_prompt_that_is_not_whole_is_not_computed(pair: Pair) -> None:
    request = spec("r", 60)
    await pair.store.create("r", spec=b"", prompt_ids=np.arange(9, dtype=np.int32))
    pair.prefill.role.on_command(run_prefill(request, pair.decode.member))

    failed = await pair.prefill.said("request_failed", "r")
    assert failed.prompt_unread and "9 of the prompt ids [0, 60)" in failed.message


async def test_a_refused_handshake_stops_the_compute(pair: Pair) -> None:
    request = spec("r", 300)
    await remember(pair.store, request, prompt(300))
    life = pair.decode.incarnation
    later = life._replace(generation=life.generation + 1)
    elsewhere = replace(pair.decode.member, incarnation=later)
    with pair.prefill.held_before_the_last_chunk():  # the refusal comes during the compute
        pair.prefill.role.on_command(run_prefill(request, elsewhere))
        failed = await pair.prefill.said("request_failed", "r")
    await pair.prefill.said("request_released", "r")
    assert failed.retryable and failed.fault == "transfer"
    assert "stale receiver" in failed.message
    assert "chunk_finished" not in pair.prefill.kinds("r")


async def test_a_failed_computation_is_reported_and_the_next_one_runs(pair: Pair) -> None:
    request = spec("bad", 20)
    await remember(pair.store, request, [10**6] * 20)  # no such token
    pair.decode.role.on_command(admit_decode(request))
    pair.prefill.role.on_command(run_prefill(request, pair.decode.member))
    await pair.ask("good", 20)

    failed = await pair.prefill.said("request_failed", "bad")
    assert not failed.retryable and failed.fault == "compute"
    await pair.prefill.said("request_released", "bad")
    await pair.decode.said("request_finished", "good")


async def test_drop_all_leaves_nothing(pair: Pair) -> None:
    with pair.prefill.held_before_the_last_chunk():
        for i in range(4):
            await pair.ask(f"r{i}", 150)
        await pair.prefill.said("chunk_started", "r0")

        async with asyncio.timeout(HANG_S):
            await pair.prefill.role.drop_all("the scheduler is gone")

    assert pair.prefill.engine.pool.used_pages == 0
    assert not any(kind == "request_failed" for kind, _ in pair.prefill.messages)


@pytest.mark.parametrize("abort", [False, True])
async def test_an_instance_lets_go_of_its_requests_and_works_on(pair: Pair, abort: bool) -> None:
    with pair.prefill.held_before_the_last_chunk():
        for i in range(4):
            await pair.ask(f"r{i}", 150)
        await pair.prefill.said("chunk_started", "r0")
        pair.prefill.role.on_command(Drain(abort=abort))
        for i in range(4):
            released = await pair.prefill.said("request_released", f"r{i}")
            assert not released.complete
            failed = [m for k, m in pair.prefill.messages if k == "request_failed"]
            assert len(failed) == 4 * abort
            assert not any(message.retryable for message in failed)
    assert pair.prefill.engine.pool.used_pages == 0
    await pair.ask("r", 20)
    await pair.decode.said("request_finished", "r")


async def test_a_defect_in_a_job_ends_the_role() -> None:
    store = GatedStore()
    prefill = LiveRole(PrefillRole, SETTINGS, name="prefill-0", hub=MemoryHub(), store=store)
    await prefill.start()
    store.error = KeyError("a defect")
    prefill.role.on_command(run_prefill(spec("r", 20), prefill.member))

    with pytest.raises(KeyError, match="a defect"):
        async with asyncio.timeout(HANG_S):
            await prefill.ended()
    await prefill.close()
