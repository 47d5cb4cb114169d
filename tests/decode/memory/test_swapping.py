"""Growth and preemption over the hashing model, in which every token depends on all KV."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from hypothesis.strategies import booleans, integers, sampled_from

from decode.memory.growing_requests import GrowingRequests
from millrace.core.cost.decode_step import DecodeStepTime
from millrace.core.errors import CapacityError
from millrace.decode.memory import priority
from millrace.decode.request import DecodeState
from millrace.engine.sampling.spec import SamplingSpec
from support.hashing_model import SPECS, greedy, prompt_of


@asynccontextmanager
async def growing(**settings_: Any) -> AsyncIterator[GrowingRequests]:
    """Checks at the end that all requests have their tokens and nothing is held."""
    instance = GrowingRequests(**settings_)
    yield instance
    await instance.drain()
    assert all(job.is_done for job in instance.jobs.values())
    instance.check()
    assert not instance.pool.used_pages
    await instance.close()


async def until(instance: GrowingRequests, wanted: Any, steps: int = 60) -> None:
    """Steps and lands arriving KV until `wanted()`."""
    for _ in range(steps):
        if wanted():
            return
        instance.land()
        instance.step()
        await instance.settle()
    raise AssertionError("it never came to it")


def runs(instance: GrowingRequests, *names: str) -> Any:
    return lambda: set(names) <= set(instance.running.batch.requests())


def swapped_out(instance: GrowingRequests) -> list[str]:
    return [name for name, state in instance.states().items() if state is DecodeState.SWAPPED]


async def test_the_last_to_arrive_gives_way_and_comes_back() -> None:
    async with growing(pages=10, swap_pages=50) as instance:
        names = [instance.ask(prompt_of(1, 6), greedy(24)) for _ in range(3)]
        await until(instance, runs(instance, *names))
        await until(instance, lambda: swapped_out(instance))
        assert swapped_out(instance) == ["r2"]
        await until(instance, runs(instance, "r2"))
        assert len(instance.jobs["r0"].got[0]) == 24
    assert all(job.lives == 1 for job in instance.jobs.values())


async def test_without_room_on_the_host_it_is_computed_anew() -> None:
    async with growing(pages=10, swap_pages=2) as instance:
        names = [instance.ask(prompt_of(1, 6), greedy(24)) for _ in range(3)]
        await until(instance, runs(instance, *names))
    assert instance.jobs["r0"].lives == 1
    assert instance.jobs["r2"].lives > 1


async def test_who_is_in_danger_gives_way_last() -> None:
    """r2 arrived last, and its objective leaves no time to wait."""
    async with growing(pages=10, swap_pages=50) as instance:
        names = [instance.ask(prompt_of(1, 6), greedy(24), tbt_s=tbt_s) for tbt_s in (0, 0, 1e-6)]
        await until(instance, runs(instance, *names))
        await until(instance, lambda: swapped_out(instance))
        assert swapped_out(instance) == ["r1"]


async def test_one_that_finds_nobody_to_give_way_waits_in_its_pages() -> None:
    """r1 could preempt only r2, whose KV is still in flight."""
    async with growing(pages=9, swap_pages=50) as instance:
        names = [instance.ask(prompt_of(1, 6), greedy(24)) for _ in range(2)]
        await until(instance, runs(instance, *names))
        instance.ask(prompt_of(2, 6), greedy(24))
        instance.step()
        assert len(instance.landings.in_transit) == 1
        for _ in range(20):
            instance.step()
            await instance.settle()
        assert swapped_out(instance) == ["r1"]
        assert instance.states()["r0"] is DecodeState.PAUSED
        assert not instance.running.batch.size
    assert instance.joined.index("r2") > instance.joined.index("r0")


async def test_choices_leave_together_and_hold_all_their_pages() -> None:
    """Several choices do not grow. Their KV leaves for an earlier request that grows."""
    sampled = SamplingSpec(max_tokens=9, temperature=1.0, seed=4, n=3)
    async with growing(pages=13, swap_pages=50) as instance:
        instance.ask(prompt_of(1, 6), greedy(40))
        instance.ask(prompt_of(2, 7), sampled)
        await until(instance, runs(instance, "r0", "r1"))
        assert len(instance.table.get("r1").pages) == 1 + 3 * 3
        await until(instance, lambda: swapped_out(instance))
        assert swapped_out(instance) == ["r1"]
        assert "r1" not in instance.running.batch.requests()
    assert instance.jobs["r1"].lives == 1


async def test_choices_that_the_host_has_no_room_for_stay() -> None:
    sampled = SamplingSpec(max_tokens=9, temperature=1.0, seed=4, n=3)
    async with growing(pages=14, swap_pages=3) as instance:
        instance.ask(prompt_of(1, 6), greedy(40))
        instance.ask(prompt_of(2, 7), sampled)
    assert [job.lives for job in instance.jobs.values()] == [1, 1]


async def test_one_that_has_yet_to_join_gives_way_too() -> None:
    sampled = SamplingSpec(max_tokens=6, temperature=1.0, seed=4, n=2)
    async with growing(pages=11, swap_pages=50, max_batch=2) as instance:
        instance.ask(prompt_of(1, 6), greedy(30))
        instance.ask(prompt_of(2, 7), sampled)  # the batch has no room for both choices
        await until(instance, lambda: swapped_out(instance))
        assert swapped_out(instance) == ["r1"]
        assert "r1" not in instance.joined
    assert instance.jobs["r1"].lives == 1


async def test_nobody_passes_by_one_that_was_preempted() -> None:
    async with growing(pages=10, swap_pages=50) as instance:
        names = [instance.ask(prompt_of(1, 6), greedy(24)) for _ in range(3)]
        await until(instance, runs(instance, *names))
        await until(instance, lambda: swapped_out(instance))
        instance.ask(prompt_of(3, 1), greedy(2))  # of a page
        while swapped_out(instance):
            assert instance.landings.waiting()
            instance.step()
            await instance.settle()


async def test_one_that_waited_its_share_goes_before_objectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(priority, "LONGEST_AWAY_S", 0.0)
    async with growing(pages=10, swap_pages=50) as instance:
        names = [instance.ask(prompt_of(1, 6), greedy(24)) for _ in range(3)]
        await until(instance, runs(instance, *names))
        await until(instance, lambda: swapped_out(instance))
        urgent = instance.ask(prompt_of(3, 6), greedy(6), tbt_s=1e-6)
        waiting = [instance.table.get("r2"), instance.table.get(urgent)]
        ordered = sorted(waiting, key=lambda request: priority.priority_of(request, 0.0))
        assert [request.id for request in ordered] == ["r2", urgent]


@pytest.mark.parametrize(
    "state",
    [
        DecodeState.SWAPPING_OUT,
        DecodeState.SWAPPED,
        DecodeState.SWAPPING_IN,
        DecodeState.PAUSED,
    ],
)
async def test_cancelled_while_away(state: DecodeState) -> None:
    async with growing(pages=10, swap_pages=50) as instance:
        names = [instance.ask(prompt_of(1, 6), greedy(24)) for _ in range(3)]
        await until(instance, runs(instance, *names))
        await until(instance, lambda: swapped_out(instance))
        if state is DecodeState.SWAPPING_OUT:
            await until(instance, runs(instance, "r2"))
            for _ in range(100):
                instance.step()
                if instance.states()["r2"] is DecodeState.SWAPPING_OUT:
                    break
            else:
                state = DecodeState.SWAPPED  # the second time, it had enough
        elif state is not DecodeState.SWAPPED:
            for _ in range(100):
                instance.step()
                if instance.states()["r2"] is DecodeState.SWAPPING_IN:
                    break
                await instance.settle()
            if state is DecodeState.PAUSED:
                await instance.settle()
                assert instance.states()["r2"] is DecodeState.PAUSED
        instance.cancel("r2")
        instance.step()
        await instance.settle()
        instance.step()
        await instance.settle()
        assert instance.table.get("r2") is None


def test_what_could_never_fit_is_refused() -> None:
    async def work() -> None:
        async with growing(pages=10, swap_pages=0) as instance:
            with pytest.raises(CapacityError, match="11 KV pages may be wanted in all"):
                instance.ask(prompt_of(1, 4), greedy(40))
            instance.ask(prompt_of(1, 4), greedy(36))

    asyncio.run(work())


async def test_whole_reservations_never_make_way() -> None:
    async with growing(pages=10, swap_pages=50, reserve="whole") as instance:
        request = instance.ask(prompt_of(1, 6), greedy(24))
        instance.landings.let_in(instance.table.get(request))
        assert len(instance.table.get(request).pages) == 8
        await until(instance, runs(instance, request))
    assert instance.running.owed_pages == 0


async def test_who_can_wait_does_not_break_the_tightest_objective() -> None:
    """A step of two sequences is predicted to take 2 s."""
    step = DecodeStepTime(base_s=0.0, per_sequence_s=1.0, per_context_token_s=0.0)
    async with growing(pages=40, swap_pages=0, step=step) as instance:
        instance.ask(prompt_of(1, 6), greedy(5), tbt_s=1.5)
        instance.ask(prompt_of(2, 6), greedy(5))
        await until(instance, lambda: instance.jobs["r0"].is_done)
        assert len(instance.jobs["r1"].got[0]) <= 2
        await until(instance, runs(instance, "r1"))
        instance.ask(prompt_of(3, 6), greedy(5), tbt_s=1e-6)  # it can't wait; none is broken
        await until(instance, runs(instance, "r1", "r2"))


async def test_who_can_wait_does_not_break_the_pace_of_an_end_to_end_objective() -> None:
    """Of 100 s, r0 has some 25 for each of the four tokens that are expected after its first."""
    step = DecodeStepTime(base_s=0.0, per_sequence_s=15.0, per_context_token_s=0.0)
    async with growing(pages=40, swap_pages=0, step=step) as instance:
        instance.ask(prompt_of(1, 6), greedy(5), e2e_s=100.0, answer_tokens=5.0)
        instance.ask(prompt_of(2, 6), greedy(5))
        await until(instance, lambda: instance.jobs["r0"].is_done)
        assert len(instance.jobs["r1"].got[0]) <= 2


async def test_nobody_waits_for_a_pace_that_an_empty_batch_would_break() -> None:
    step = DecodeStepTime(base_s=0.0, per_sequence_s=15.0, per_context_token_s=0.0)
    async with growing(pages=40, swap_pages=0, step=step) as instance:
        instance.ask(prompt_of(1, 6), greedy(30), tbt_s=14.0)
        instance.ask(prompt_of(2, 6), greedy(5))
        await until(instance, runs(instance, "r0", "r1"))


async def test_an_end_to_end_objective_brings_its_answer_into_danger() -> None:
    """r2 has some 10 s for each of 2,000 tokens, so it can't be out of the batch for 10,000 s."""
    async with growing(pages=40, swap_pages=0) as instance:
        paces = ({}, {"e2e_s": 2e4}, {"e2e_s": 2e4, "answer_tokens": 2000.0}, {"tbt_s": 1e6})
        names = [instance.ask(prompt_of(1, 6), greedy(24), **pace) for pace in paces]
        await until(instance, runs(instance, *names))
        requests = [instance.table.get(name) for name in names]
        assert [priority.in_danger(request, 1e4) for request in requests] == [0, 0, 1, 0]


async def test_nobody_waits_for_ever_for_others_objectives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = DecodeStepTime(base_s=0.0, per_sequence_s=1.0, per_context_token_s=0.0)
    async with growing(pages=40, swap_pages=0, step=step) as instance:
        instance.ask(prompt_of(1, 6), greedy(30), tbt_s=1.5)
        instance.ask(prompt_of(2, 6), greedy(5))
        await until(instance, lambda: instance.jobs["r1"].got[0])
        instance.step()
        assert not runs(instance, "r1")()
        monkeypatch.setattr(priority, "LONGEST_AWAY_S", 0.0)
        await until(instance, runs(instance, "r0", "r1"))


SETTINGS = sampled_from([(9, 0), (9, 6), (14, 3), (14, 40), (30, 10)])


class Churn(RuleBasedStateMachine):
    """Any order of arrivals, landings, steps, cancels and progress of copies: all is consistent
    after each, and at the end every answer is the same as alone."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.instance: GrowingRequests | None = None

    def wait(self, work: Coroutine[Any, Any, None]) -> None:
        self.loop.run_until_complete(work)

    @precondition(lambda self: self.instance is None)
    @rule(sizes=SETTINGS, headroom=integers(1, 6), ahead=booleans())
    def begin(self, sizes: tuple[int, int], headroom: int, ahead: bool) -> None:
        async def made() -> None:
            self.instance = GrowingRequests(
                pages=sizes[0], swap_pages=sizes[1], headroom_tokens=headroom, ahead=ahead
            )

        self.wait(made())

    @precondition(lambda self: self.instance is not None and len(self.instance.table) < 8)
    @rule(
        length=integers(1, 20),
        spec=sampled_from(SPECS),
        seed=integers(0, 99),
        n=sampled_from((1, 1, 1, 2)),
        tbt_s=sampled_from((0.0, 0.0, 1e-6, 10.0)),
    )
    def ask(self, length: int, spec: SamplingSpec, seed: int, n: int, tbt_s: float) -> None:
        async def asked() -> None:
            assert self.instance is not None
            with suppress(CapacityError):
                self.instance.ask(prompt_of(seed, length), replace(spec, n=n), tbt_s=tbt_s)

        self.wait(asked())

    @precondition(lambda self: self.instance is not None)
    @rule(pick=integers(0, 5))
    def land(self, pick: int) -> None:
        assert self.instance is not None
        self.instance.land(pick)

    @precondition(lambda self: self.instance is not None)
    @rule(count=integers(1, 6), turns=integers(0, 3))
    def step(self, count: int, turns: int) -> None:
        async def stepped() -> None:
            assert self.instance is not None
            for _ in range(count):
                self.instance.step()
                for _ in range(turns):
                    await self.instance.turn()

        self.wait(stepped())

    @precondition(lambda self: self.instance is not None and self.instance.jobs)
    @rule(pick=integers(0, 30))
    def cancel(self, pick: int) -> None:
        assert self.instance is not None
        names = sorted(self.instance.jobs)
        self.instance.cancel(names[pick % len(names)])

    @precondition(lambda self: self.instance is not None)
    @rule()
    def settle(self) -> None:
        assert self.instance is not None
        self.wait(self.instance.settle())

    @invariant()
    def in_order(self) -> None:
        if self.instance is not None:
            self.instance.check()

    def teardown(self) -> None:
        if self.instance is not None:
            self.wait(self.instance.drain())
            assert all(job.is_done for job in self.instance.jobs.values())
            self.instance.check()
            self.wait(self.instance.close())
        self.loop.close()


TestChurn = Churn.TestCase
TestChurn.settings = settings(max_examples=30, stateful_step_count=30)
