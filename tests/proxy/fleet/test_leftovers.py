"""What refused requests leave in a store that was silent: their writes are made later."""

from __future__ import annotations

import asyncio

import pytest

from millrace.proxy.fleet import leftovers as module
from millrace.proxy.fleet.leftovers import CREATE_PAUSES_S, Leftovers
from millrace.state.store import IdTaken, StoreError


class Store:
    """Makes the writes of refused requests one by one: each after the removal of the one before."""

    def __init__(self, late: int) -> None:
        self.late = list(range(late))
        self.record: int | str | None = None

    async def create(self) -> None:
        if self.record is None and self.late:
            self.record = self.late.pop(0)
        if self.record is not None:
            raise IdTaken("taken")
        self.record = "new"

    async def remove(self, number: int) -> bool:
        if self.record != number:
            return False
        self.record = None
        return True


def knowing(store: Store, requests: int) -> Leftovers:
    leftovers = Leftovers()
    for number in range(requests):
        leftovers.add("r", lambda number=number: store.remove(number))
    return leftovers


@pytest.mark.parametrize("late", [0, 1, 3, len(CREATE_PAUSES_S)])
async def test_an_id_is_free_however_many_refused_requests_left_it_taken(late: int) -> None:
    store = Store(late)
    leftovers = knowing(store, late)
    await leftovers.create("r", store.create)
    assert store.record == "new"
    await leftovers.close(1.0)
    assert store.record == "new"  # nothing of another request's is removed


async def test_an_id_that_somebody_else_has_stays_taken() -> None:
    store = Store(0)
    store.record = "of another replica"
    leftovers = knowing(store, 2)
    with pytest.raises(IdTaken):
        await leftovers.create("r", store.create)
    with pytest.raises(IdTaken):
        await leftovers.create("unknown", store.create)
    await leftovers.close(1.0)
    assert store.record == "of another replica"


async def test_an_id_is_free_though_its_leftover_goes_before_the_answer_comes() -> None:
    """One round trip has both calls: the id was taken, and then it was freed."""
    sent, forgotten, calls = asyncio.Event(), asyncio.Event(), []

    async def remove() -> bool:
        await sent.wait()
        asyncio.get_running_loop().call_later(0.01, forgotten.set)
        return True

    async def create() -> None:
        calls.append("create")
        if len(calls) == 1:
            sent.set()
            await forgotten.wait()
            raise IdTaken("taken")

    leftovers = Leftovers()
    leftovers.add("r", remove)
    await leftovers.create("r", create)
    assert len(calls) == 2
    await leftovers.close(1.0)


class Pauses:
    """No pauses; notes the failures that they follow."""

    def __init__(self) -> None:
        self.failures: list[int] = []

    def pause_s(self, failures: int) -> float:
        self.failures.append(failures)
        return 0.0


async def test_pauses_begin_again_when_the_store_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The id is taken elsewhere until then: those before are short, however long it is away."""
    away, after = Pauses(), Pauses()
    monkeypatch.setattr(module, "AWAY_PAUSES", away)
    monkeypatch.setattr(module, "PAUSES", after)
    answers = [StoreError("away")] * 3 + [False, False, True]
    removed = asyncio.Event()

    async def remove() -> bool:
        answer = answers.pop(0)
        if isinstance(answer, StoreError):
            raise answer
        if answer:
            removed.set()
        return answer

    leftovers = Leftovers()
    leftovers.add("r", remove)
    await removed.wait()
    await leftovers.close(1.0)
    assert (away.failures, after.failures) == ([0, 1, 2], [0, 1])
