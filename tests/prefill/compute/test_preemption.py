"""A prefill instance that preempts and batches: same tokens, right reports, nothing held back."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import pytest_asyncio

from millrace.core.scheduler.commands import Registered
from millrace.core.token_events import FinishedPrefill
from millrace.engine.forward.passes import Boundary
from millrace.engine.forward.prefill_task import PrefillTask
from support.deadlines import HANG_S, eventually
from support.metrics import total
from support.role_pair import Pair, finished_messages, live_pair
from support.worker_roles import batches, config, order

LONG, SHORT = 1500, 40


@pytest_asyncio.fixture(params=["llama", "mixtral"])
async def pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    async with live_pair(config(max_chunk_tokens=500), model=request.param) as made:
        yield made


@pytest.fixture
def finished(monkeypatch: pytest.MonkeyPatch) -> dict[str, FinishedPrefill]:
    return finished_messages(monkeypatch)


def yields_at(pair: Pair, granularity: str) -> None:
    pair.prefill.role.on_command(Registered(preemption=granularity))


def first_tokens(finished: dict[str, FinishedPrefill]) -> dict[str, list[int]]:
    """Returns prefill's first tokens and the first one's log-probability, by request."""
    return {
        name: [
            *(token.token_id for token in message.first_tokens),
            round(message.first_tokens[0].logprobs.chosen[1], 3),
        ]
        for name, message in finished.items()
    }


@contextmanager
def passes_held(pair: Pair) -> Iterator[threading.Semaphore]:
    """Holds each pass at its first boundary until a permit, or until the end of the block."""
    runner, permits = pair.prefill.engine.runner, threading.Semaphore(0)
    prefill = runner.prefill_batch

    def held(tasks: Sequence[PrefillTask]) -> Generator[Boundary]:
        for index, boundary in enumerate(prefill(tasks)):
            if index == 0:
                assert permits.acquire(timeout=HANG_S)
            yield boundary

    runner.prefill_batch = held  # type: ignore[method-assign] # the test's
    try:
        yield permits
    finally:
        runner.prefill_batch = prefill  # type: ignore[method-assign]
        permits.release(100)


def kinds(pair: Pair, request_id: str) -> list[str]:
    return pair.prefill.kinds(request_id)


@pytest.mark.parametrize("granularity", ["operator", "layer", "chunk"])
async def test_a_short_one_passes_a_long_one_and_both_get_their_tokens(
    pair: Pair, finished: dict[str, FinishedPrefill], granularity: str
) -> None:
    sampling: dict[str, Any] = {"temperature": 0.8, "seed": 5, "n": 2, "logprobs": 1}
    for name, length in (("alone", LONG), ("quiet", SHORT)):
        await pair.ask(name, length, **sampling)
        await pair.prefill.said("request_released", name)
    yields_at(pair, granularity)
    with passes_held(pair):
        await pair.ask("long", LONG, **sampling)
        await pair.prefill.said("chunk_started", "long")
        await pair.ask("short", SHORT, **sampling)
        pair.prefill.role.on_command(order("short", "long"))
        await eventually(lambda: pair.prefill.has_shaken_hands("short"))
    for name in ("short", "long"):
        await pair.prefill.said("request_released", name)

    tokens = first_tokens(finished)
    assert tokens["long"] == tokens["alone"]
    assert tokens["short"] == tokens["quiet"]
    assert kinds(pair, "long") == [
        *("chunk_started", "chunk_suspended", "chunk_started", "chunk_finished"),
        "request_released",
    ]
    said = [(kind, m.request_id) for kind, m in pair.prefill.messages]
    assert said.index(("chunk_finished", "short")) < said.index(("chunk_finished", "long"))
    suspended = await pair.prefill.said("chunk_suspended", "long")
    ended = await pair.prefill.said("chunk_finished", "long")
    assert 0 < suspended.compute_s < ended.compute_s
    text = pair.prefill.registry.render()[0].decode()
    assert "millrace_prefill_preempted_tasks_total 1.0" in text
    assert "millrace_prefill_preemption_blocking_seconds_count 1.0" in text
    assert "millrace_prefill_suspended_tasks 0.0" in text


async def test_without_preemption_a_long_one_goes_on(pair: Pair) -> None:
    await pair.ask("long", LONG)
    await pair.prefill.said("chunk_started", "long")
    await pair.ask("short", SHORT)
    pair.prefill.role.on_command(order("short", "long"))
    await pair.prefill.said("request_released", "short")
    assert "chunk_suspended" not in kinds(pair, "long")


async def test_a_suspended_one_is_cancelled_while_another_computes(pair: Pair) -> None:
    yields_at(pair, "operator")
    with passes_held(pair) as permits:
        await pair.ask("first", LONG)
        await pair.prefill.said("chunk_started", "first")
        await pair.ask("second", 2 * LONG)
        pair.prefill.role.on_command(order("second", "first"))
        await eventually(lambda: pair.prefill.has_shaken_hands("second"))
        permits.release()  # the first task sees that it must yield
        await pair.prefill.said("chunk_suspended", "first")
        pair.prefill.cancel("first")
        permits.release()  # the second task computes a pass, and is held in the next

        await pair.prefill.said("request_released", "first")
        assert "chunk_finished" not in kinds(pair, "first") + kinds(pair, "second")
    await pair.prefill.said("request_released", "second")
    assert "chunk_finished" in kinds(pair, "second")


async def test_batched_prompts_are_one_pass_with_the_tokens_of_each_alone(
    pair: Pair, finished: dict[str, FinishedPrefill]
) -> None:
    names = ("a", "b", "c")
    for index, name in enumerate(names):
        await pair.ask(f"{name}-alone", SHORT + index, logprobs=0)
        await pair.prefill.said("request_released", f"{name}-alone")
    before = passes(pair)
    with passes_held(pair):
        await pair.ask("long", LONG, logprobs=0)
        await pair.prefill.said("chunk_started", "long")
        for index, name in enumerate(names):
            await pair.ask(name, SHORT + index, logprobs=0)
        await eventually(lambda: pair.prefill.has_shaken_hands("c"))
        pair.prefill.role.on_command(batches(("long",), names))
    for name in names:
        await pair.prefill.said("request_released", name)

    tokens = first_tokens(finished)
    assert passes(pair) - before == 3 + 1  # the long prompt's passes, and one of all three
    for name in names:
        assert tokens[name] == tokens[f"{name}-alone"]
        assert kinds(pair, name) == ["chunk_started", "chunk_finished", "request_released"]


@pytest.mark.parametrize("size", [400, 450], ids=["in its pass", "in a pass of their own"])
async def test_a_cancelled_one_leaves_its_batch_and_the_others_go_on(
    pair: Pair, finished: dict[str, FinishedPrefill], size: int
) -> None:
    await pair.ask("b-alone", size, logprobs=0)
    await pair.prefill.said("request_released", "b-alone")
    with passes_held(pair) as permits:
        await pair.ask("long", SHORT, logprobs=0)
        await pair.prefill.said("chunk_started", "long")
        for name in ("a", "b"):
            await pair.ask(name, size if name == "b" else 90, logprobs=0)
        await eventually(lambda: pair.prefill.has_shaken_hands("b"))
        pair.prefill.role.on_command(batches(("long",), ("a", "b")))
        permits.release()
        await pair.prefill.said("chunk_started", "a")
        pair.prefill.cancel("a")
    for name in ("a", "b"):
        await pair.prefill.said("request_released", name)

    tokens = first_tokens(finished)
    assert tokens["b"] == tokens["b-alone"]
    assert kinds(pair, "a") == ["chunk_started", "request_released"]


async def test_a_pass_of_a_batch_has_the_names_of_its_prompts(pair: Pair) -> None:
    """By them later stages drop the passes of a prompt, before its pages are freed."""
    names = []
    with passes_held(pair) as permits:
        held = pair.prefill.engine.runner.prefill_batch

        def noted(tasks: Sequence[PrefillTask]) -> Generator[Boundary]:
            names.append([task.name for task in tasks])
            return held(tasks)

        await pair.ask("long", SHORT)
        await pair.prefill.said("chunk_started", "long")
        pair.prefill.engine.runner.prefill_batch = noted  # type: ignore[method-assign]
        for name in ("a", "b", "c"):
            await pair.ask(name, 450 if name == "c" else 90)
        await eventually(lambda: pair.prefill.has_shaken_hands("c"))
        pair.prefill.role.on_command(batches(("long",), ("a", "b", "c")))
        permits.release(100)
        for name in ("a", "b", "c"):
            await pair.prefill.said("request_released", name)
    assert names == [["a", "b"], ["c"]]


async def test_the_first_of_a_batch_may_come_again_before_the_others_are_computed(
    pair: Pair, finished: dict[str, FinishedPrefill]
) -> None:
    with passes_held(pair) as permits:
        await pair.ask("long", SHORT)
        await pair.prefill.said("chunk_started", "long")
        for name in ("a", "b"):
            await pair.ask(name, 450 if name == "b" else 90)
        await eventually(lambda: pair.prefill.has_shaken_hands("b"))
        pair.prefill.role.on_command(batches(("long",), ("a", "b")))
        permits.release(2)  # the long prompt and "a"
        await pair.prefill.said("request_released", "a")
        await pair.prefill.said("chunk_started", "b")
        await pair.decode.said("request_finished", "a")
        pair.prefill.messages.clear()
        finished.clear()
        await pair.store.delete("a")
        await pair.ask("a", 90)
        await eventually(lambda: pair.prefill.has_shaken_hands("a"))
    for name in ("a", "b"):
        await pair.prefill.said("request_released", name)
    assert kinds(pair, "a") == ["chunk_started", "chunk_finished", "request_released"]
    assert set(finished) == {"a", "b"}


async def test_a_cancelled_one_may_come_again(pair: Pair) -> None:
    """A name that has left the pool may be used again."""
    yields_at(pair, "operator")
    for _ in range(2):
        pair.prefill.messages.clear()
        await pair.store.delete("r")
        await pair.ask("r", LONG)
        await pair.prefill.said("chunk_started", "r")
        pair.prefill.cancel("r")
        await pair.prefill.said("request_released", "r")


def passes(pair: Pair) -> int:
    return int(total(pair.prefill.registry, "millrace_prefill_compute_seconds_count"))
