"""The lock goes by the current order, and no cancellation at any moment loses it."""

import asyncio
import random

import pytest

from millrace.prefill.priority_lock import PriorityLock
from support.deadlines import HANG_S


class Crowd:
    """Workers that take the lock one after another; `went` lists them in order."""

    def __init__(self, order: list[str]) -> None:
        self.order = order
        self.turn = PriorityLock(order)
        self.went: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}

    async def wants(self, *names: str) -> None:
        """Lets workers ask for the lock one after another; the first worker gets it at once."""
        for name in names:
            self.tasks[name] = asyncio.create_task(self._take(name))
            await asyncio.sleep(0)

    async def _take(self, name: str) -> None:
        await self.turn.acquire(name)
        self.went.append(name)

    async def all_go(self) -> None:
        """Lets every worker release the lock as soon as it has the lock."""
        for _ in self.tasks:
            await settled()
            self.turn.release()
        await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_the_first_in_the_order_goes_not_the_first_to_wait() -> None:
    crowd = Crowd(["a", "b", "c", "d"])
    await crowd.wants("b", "d", "c", "a")
    await crowd.all_go()
    assert crowd.went == ["b", "a", "c", "d"]


async def test_a_new_order_moves_those_who_wait_and_takes_nothing_from_who_has_it() -> None:
    crowd = Crowd(["a", "b", "c"])
    await crowd.wants("a", "b", "c")
    crowd.order[:] = ["c", "b", "a"]
    await settled()
    assert crowd.went == ["a"]
    await crowd.all_go()
    assert crowd.went == ["a", "c", "b"]


async def test_who_is_not_in_the_order_goes_last_as_he_came() -> None:
    crowd = Crowd(["a", "c"])
    await crowd.wants("a", "x", "y", "c")
    await crowd.all_go()
    assert crowd.went == ["a", "c", "x", "y"]


async def test_the_first_who_does_not_wait_holds_nobody_up() -> None:
    crowd = Crowd(["not here yet", "a", "b"])
    await crowd.wants("a", "b")
    crowd.turn.release()
    await settled()
    assert crowd.went == ["a", "b"]


async def test_cancelled_while_it_waits_it_is_passed_over() -> None:
    crowd = Crowd(["a", "b", "c"])
    await crowd.wants("a", "b", "c")
    crowd.tasks["b"].cancel()
    crowd.turn.release()  # before b runs
    await settled()
    assert crowd.tasks["b"].cancelled()
    assert crowd.went == ["a", "c"]


async def test_cancelled_in_the_moment_it_was_given_the_turn_it_hands_it_on() -> None:
    crowd = Crowd(["a", "b", "c"])
    await crowd.wants("a", "b", "c")
    crowd.turn.release()
    crowd.tasks["b"].cancel()  # b has the lock and has not run yet
    await settled()
    assert crowd.tasks["b"].cancelled()
    assert crowd.went == ["a", "c"]


async def test_after_the_last_one_the_turn_is_free() -> None:
    crowd = Crowd(["a", "b"])
    await crowd.wants("a", "b")
    crowd.tasks["b"].cancel()
    crowd.turn.release()
    async with asyncio.timeout(HANG_S), crowd.turn.of("a"):
        pass
    async with asyncio.timeout(HANG_S), crowd.turn.of("b"):
        pass


async def test_the_holder_gives_way_to_earlier_ones_only_and_comes_back() -> None:
    order = ["a", "b", "c"]
    turn = PriorityLock(order)
    had: list[str] = []

    async def other(name: str) -> None:
        async with turn.of(name):
            had.append(name)

    async with asyncio.timeout(HANG_S), asyncio.TaskGroup() as group, turn.of("b"):
        group.create_task(other("c"))
        await settled()
        await turn.give_way("b")
        assert had == []
        order[:] = ["c", "b"]
        await turn.give_way("b")
        assert had == ["c"]


async def test_cancelled_while_it_gives_way_it_has_the_turn_no_more() -> None:
    order = ["b", "a"]
    turn = PriorityLock(order)

    async def gives_way() -> None:
        async with turn.of("b"):
            order[:] = ["a", "b"]
            await settled()
            await turn.give_way("b")

    giving = asyncio.create_task(gives_way())
    await asyncio.sleep(0)
    async with asyncio.timeout(HANG_S), turn.of("a"):
        giving.cancel()
        await settled()
        assert giving.cancelled()
        late = asyncio.create_task(turn.acquire("c"))
        await settled()
        assert not late.done()  # a still has it
    await late


@pytest.mark.parametrize("seed", range(20))
async def test_nobody_is_lost_and_none_share_it_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    order = [f"j{i}" for i in range(12)]
    turn = PriorityLock(order)
    inside: list[str] = []
    went: set[str] = set()

    async def job(name: str) -> None:
        for _ in range(rng.randrange(4)):
            await asyncio.sleep(0)
        async with turn.of(name):
            for _ in range(rng.randrange(3)):
                inside.append(name)
                assert inside == [name]
                try:
                    await asyncio.sleep(0)
                finally:
                    inside.remove(name)
                await turn.give_way(name)
            went.add(name)

    tasks = {name: asyncio.create_task(job(name)) for name in rng.sample(order, len(order))}
    async with asyncio.timeout(HANG_S):
        while not all(task.done() for task in tasks.values()):
            if rng.random() < 0.3:
                rng.shuffle(order)
            if rng.random() < 0.2:
                tasks[rng.choice(order)].cancel()
            await asyncio.sleep(0)
    ended = await asyncio.gather(*tasks.values(), return_exceptions=True)
    assert {type(end) for end in ended} <= {type(None), asyncio.CancelledError}
    assert went == {name for name, task in tasks.items() if not task.cancelled()}
    async with asyncio.timeout(HANG_S), turn.of("after all"):
        pass
