"""What every LeaseStore does by the same clock: in memory, on a real redis-server, on a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from millrace.core.config import StoreConfig
from millrace.state.leases import LeaseStore, MemoryLeases
from millrace.state.open import open_leases
from millrace.state.redis.leases import RedisLeases
from millrace.state.store import StoreError
from support.stores import chosen_redis, patient


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_700_000_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=["memory", "redis", "cluster"])
async def store(request: pytest.FixtureRequest, clock: Clock) -> AsyncIterator[LeaseStore]:
    if request.param == "memory":
        yield MemoryLeases(clock=clock)
        return
    async with chosen_redis(request, "scheduler") as url:
        leases = RedisLeases(patient(url), clock=clock)
        yield leases
        await leases.close()


async def test_one_holds_a_lease_until_it_lapses(store: LeaseStore, clock: Clock):
    assert await store.read("x") is None
    first = await store.acquire("x", address="a:1", ttl_s=2.0)
    assert first is not None and first.note == b""
    clock.now_s += 1.5
    assert await store.acquire("x", address="b:1", ttl_s=2.0) is None
    seen = await store.read("x")
    assert seen is not None
    assert (seen.epoch, seen.address, seen.left_s) == (first.epoch, "a:1", pytest.approx(0.5))
    clock.now_s += 0.5
    second = await store.acquire("x", address="b:1", ttl_s=2.0)
    assert second is not None and second.epoch > first.epoch
    assert not await store.renew("x", epoch=first.epoch, ttl_s=2.0, note=b"late")
    seen = await store.read("x")
    assert seen is not None and (seen.address, seen.note) == ("b:1", b"")


async def test_renewals_hold_it_and_leave_a_note(store: LeaseStore, clock: Clock):
    held = await store.acquire("x", address="a:1", ttl_s=2.0)
    assert held is not None
    for _ in range(3):
        clock.now_s += 1.5
        assert await store.renew("x", epoch=held.epoch, ttl_s=2.0, note=b"\x00note")
        assert await store.acquire("x", address="b:1", ttl_s=2.0) is None
    clock.now_s += 2.0
    after = await store.acquire("x", address="b:1", ttl_s=2.0)
    assert after is not None and after.note == b"\x00note"


async def test_a_lapsed_lease_that_nobody_took_is_held_again(store: LeaseStore, clock: Clock):
    held = await store.acquire("x", address="a:1", ttl_s=2.0)
    assert held is not None
    clock.now_s += 60.0
    seen = await store.read("x")
    assert seen is not None and seen.left_s == pytest.approx(-58.0)
    assert await store.renew("x", epoch=held.epoch, ttl_s=2.0, note=b"")
    assert await store.acquire("x", address="b:1", ttl_s=2.0) is None


async def test_a_released_lease_is_free_at_once_and_keeps_its_note(store: LeaseStore):
    held = await store.acquire("x", address="a:1", ttl_s=60.0)
    assert held is not None
    await store.renew("x", epoch=held.epoch, ttl_s=60.0, note=b"first")
    await store.release("x", epoch=held.epoch)
    after = await store.acquire("x", address="b:1", ttl_s=60.0)
    assert after is not None and after.note == b"first"
    await store.release("x", epoch=held.epoch, note=b"of the former holder")
    assert await store.acquire("x", address="c:1", ttl_s=60.0) is None
    await store.release("x", epoch=after.epoch, note=b"second")
    third = await store.acquire("x", address="c:1", ttl_s=60.0)
    assert third is not None and third.note == b"second"


async def test_a_clock_that_is_set_back_lengthens_a_lease_by_one_life_at_most(
    store: LeaseStore, clock: Clock
):
    held = await store.acquire("x", address="a:1", ttl_s=2.0)
    assert held is not None
    clock.now_s -= 3600.0
    assert await store.acquire("x", address="b:1", ttl_s=2.0) is None
    clock.now_s += 1.9
    assert await store.acquire("x", address="b:1", ttl_s=2.0) is None
    clock.now_s += 0.1
    after = await store.acquire("x", address="b:1", ttl_s=2.0)
    assert after is not None and after.epoch > held.epoch


async def test_epochs_grow_though_the_clock_goes_back(store: LeaseStore, clock: Clock):
    first = await store.acquire("x", address="a:1", ttl_s=1.0)
    assert first is not None
    await store.release("x", epoch=first.epoch)
    clock.now_s -= 3600.0
    other = await store.acquire("other", address="a:1", ttl_s=1.0)
    assert other is not None and other.epoch < first.epoch  # every lease has its own
    clock.now_s += 7200.0
    again = await store.acquire("x", address="a:1", ttl_s=1.0)
    assert again is not None and again.epoch > first.epoch


async def test_an_epoch_is_larger_than_those_that_its_taker_has_seen(
    store: LeaseStore, clock: Clock
):
    """A store without its data knows none of them."""
    seen = int(clock.now_s * 1000) + 5_500
    held = await store.acquire("x", address="a:1", ttl_s=1.0, seen=seen)
    assert held is not None and held.epoch > seen and held.epoch // 1000 > seen // 1000


async def test_no_two_epochs_are_of_one_second(store: LeaseStore, clock: Clock):
    """Attempts at requests are numbered by the second in which their scheduler began to lead."""
    seconds = []
    for _ in range(3):
        held = await store.acquire("x", address="a:1", ttl_s=1.0)
        assert held is not None
        await store.release("x", epoch=held.epoch)
        seconds.append(held.epoch // 1000)
        clock.now_s += 0.01
    assert seconds == sorted(set(seconds))


async def test_an_epoch_ahead_of_the_time_is_told_apart_by_its_ms(store: LeaseStore, clock: Clock):
    """A store that has lost its data gives one second again."""
    epochs = []
    for name in ("x", "as after a loss"):
        held = await store.acquire(name, address="a:1", ttl_s=1.0)
        assert held is not None
        await store.release(name, epoch=held.epoch)
        clock.now_s += 0.01
        ahead = await store.acquire(name, address="a:1", ttl_s=1.0)
        assert ahead is not None
        epochs.append(ahead.epoch)
        clock.now_s += 0.01
    assert epochs[0] // 1000 == epochs[1] // 1000 and epochs[0] != epochs[1]


async def test_epochs_grow_though_the_store_lost_its_data(clock: Clock):
    first = await MemoryLeases(clock=clock).acquire("x", address="a:1", ttl_s=1.0)
    clock.now_s += 1.0
    second = await MemoryLeases(clock=clock).acquire("x", address="a:1", ttl_s=1.0)
    assert first is not None and second is not None and second.epoch > first.epoch


async def test_a_store_that_does_not_answer_says_so():
    leases = open_leases(StoreConfig(url="redis://127.0.0.1:1/0"))
    with pytest.raises(StoreError):
        await leases.read("x")
    await leases.close()
