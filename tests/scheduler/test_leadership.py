"""One scheduler leads, and knows when it certainly does."""

from __future__ import annotations

import asyncio

import pytest

from millrace.concurrency import cancel
from millrace.core.config import SchedulerConfig
from millrace.scheduler.leadership import Leadership, LeadershipLost
from millrace.state.leases import MemoryLeases
from support.deadlines import eventually


class Clock:
    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


class ForgetfulLeases(MemoryLeases):
    """A store that may lose its data."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(clock=clock)
        self._own_clock = clock

    def forget(self) -> None:
        super().__init__(clock=self._own_clock)


def leadership(
    leases: MemoryLeases, address: str, clock: Clock, lease_s: float = 2.0
) -> Leadership:
    return Leadership(leases, address, SchedulerConfig(leader_lease_s=lease_s), clock)


async def certain(of: Leadership) -> bool:
    task = asyncio.create_task(of.certain())
    for _ in range(3):
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    return not task.cancelled()


async def test_the_second_stands_by_and_knows_the_first():
    clock = Clock()
    leases = MemoryLeases(clock=clock)
    first, second = (leadership(leases, name, clock) for name in ("a:1", "b:1"))
    assert await first.try_to_lead() is not None
    assert await second.try_to_lead() is None
    assert second.leader == "a:1"
    assert await certain(first)
    clock.now_s += 2.0
    assert not await certain(first)  # it was paused
    assert await second.try_to_lead() is not None
    with pytest.raises(LeadershipLost, match="is over"):
        await first.keep(lambda: b"", asyncio.Event())


async def test_a_leader_ends_when_a_peer_has_seen_a_later_epoch():
    clock = Clock()
    leases = MemoryLeases(clock=clock)
    first, second = (leadership(leases, name, clock) for name in ("a:1", "b:1"))
    lease = await first.try_to_lead()
    assert lease is not None
    keeping = asyncio.create_task(first.keep(lambda: b"note", asyncio.Event()))
    await asyncio.sleep(0)
    seen = lease.epoch + 7_000  # before the store lost its data
    first.outrun(seen)
    with pytest.raises(LeadershipLost, match=f"a peer has seen epoch {seen}"):
        await keeping
    assert not await certain(first)
    after = await second.try_to_lead()  # at once, by the same clock
    assert after is not None
    assert after.note == b"note" and after.epoch // 1000 > seen // 1000


async def test_a_scheduler_that_has_handed_over_writes_nothing_more():
    clock = Clock()
    leases = MemoryLeases(clock=clock)
    first, second = (leadership(leases, name, clock) for name in ("a:1", "b:1"))
    await first.try_to_lead()
    await first.release(b"note")
    assert not await certain(first)
    lease = await second.try_to_lead()
    assert lease is not None and lease.note == b"note"


async def test_a_store_that_lost_its_data_gets_the_note_again():
    clock = Clock()
    leases = ForgetfulLeases(clock)
    first, second = (leadership(leases, name, clock) for name in ("a:1", "b:1"))
    lost = await first.try_to_lead()
    leases.forget()
    with pytest.raises(LeadershipLost):
        await first.keep(lambda: b"note", asyncio.Event())
    assert not await certain(first)
    lease = await second.try_to_lead()
    assert lost is not None and lease is not None
    assert lease.epoch > lost.epoch and lease.note == b"note"


async def test_epochs_grow_though_the_store_loses_its_data_again_and_again():
    """Quick successions take the epochs ahead of the time, from which an empty store begins."""
    clock = Clock()
    leases = ForgetfulLeases(clock)
    leader, epochs = leadership(leases, "0:1", clock), []
    for number in range(4):
        lease = await leader.try_to_lead()
        assert lease is not None
        epochs.append(lease.epoch)
        standby = leadership(leases, f"{number + 1}:1", clock)
        assert await standby.try_to_lead() is None  # it sees who leads
        leases.forget()
        with pytest.raises(LeadershipLost):
            await leader.keep(lambda: b"note", asyncio.Event())
        leases.forget()
        leader = standby
    assert epochs == sorted(set(epochs))


async def test_a_note_that_has_changed_is_renewed_at_once():
    clock = Clock()
    leases = MemoryLeases(clock=clock)
    first = leadership(leases, "a:1", clock, lease_s=3600.0)
    lease = await first.try_to_lead()
    assert lease is not None
    notes, changed = [b"one", b"two"], asyncio.Event()
    keeping = asyncio.create_task(first.keep(lambda: notes[0], changed))

    async def is_noted(wanted: bytes) -> bool:
        known = await leases.read("scheduler")
        return known is not None and known.note == wanted

    await eventually(lambda: is_noted(b"one"))
    del notes[0]
    changed.set()
    await eventually(lambda: is_noted(b"two"))
    await cancel(keeping)


async def test_the_note_of_a_later_leader_stays():
    clock = Clock()
    leases = MemoryLeases(clock=clock)
    first, second, third = (leadership(leases, name, clock) for name in ("a:1", "b:1", "c:1"))
    await first.try_to_lead()
    clock.now_s += 2.0
    await second.try_to_lead()
    await second.release(b"of the second")
    with pytest.raises(LeadershipLost):
        await first.keep(lambda: b"of the first", asyncio.Event())
    lease = await third.try_to_lead()
    assert lease is not None and lease.note == b"of the second"
