"""Who leads: when a stream to a scheduler has to end because another one leads."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from millrace.state.leader import LeaderWatch
from millrace.state.leases import MemoryLeases
from support.deadlines import HANG_S, eventually


class Schedulers:
    """Schedulers that lead one after the other, and a peer's stream to one of them."""

    def __init__(self) -> None:
        self._leases = MemoryLeases()
        self._epoch = 0
        self.watch = LeaderWatch(self._leases, "a:1,b:1")
        self.watch.follow("lease", "a:1")

    async def lead(self, address: str) -> None:
        """Has the scheduler at `address` lead."""
        await self._leases.release("lease", epoch=self._epoch)
        lease = await self._leases.acquire("lease", address=address, ttl_s=60.0)
        assert lease is not None
        self._epoch = lease.epoch

    async def open(self, address: str, changes: int | None = None) -> asyncio.Task[None]:
        """Opens a stream to `address` that nobody ends, chosen after so many `changes`."""
        changes = self.watch.changes if changes is None else changes
        opened, endless = asyncio.Event(), asyncio.Event()

        async def stream() -> None:
            opened.set()
            await endless.wait()

        served = self.watch.serve_until_replaced(address, changes, stream())
        task = asyncio.create_task(served)
        await opened.wait()
        return task

    def answered(self, address: str) -> None:
        """The first message of the leader at `address` comes."""
        assert self.watch.fence.admits(self._epoch)
        self.watch.follow("lease", address)

    async def read(self, changes: int) -> None:
        """Waits until the watch has found so many changes, and the stream has heard of them."""
        await eventually(lambda: self.watch.changes == changes)
        for _ in range(10):
            await asyncio.sleep(0)


@pytest_asyncio.fixture
async def schedulers() -> AsyncIterator[Schedulers]:
    made = Schedulers()
    await made.lead("a:1")
    watching = asyncio.create_task(made.watch.run())
    await made.read(1)
    yield made
    watching.cancel()


async def ended(stream: asyncio.Task[None]) -> None:
    async with asyncio.timeout(HANG_S):
        await stream


async def test_a_stream_ends_when_another_scheduler_leads(schedulers: Schedulers) -> None:
    stream = await schedulers.open("a:1")
    await schedulers.lead("b:1")
    await ended(stream)
    assert schedulers.watch.address() == "b:1"


async def test_a_stream_to_a_leader_whose_lease_is_not_read_yet_goes_on(
    schedulers: Schedulers,
) -> None:
    await schedulers.lead("b:1")
    stream = await schedulers.open("b:1")  # a standby has named it
    await schedulers.read(2)
    assert not stream.done()
    schedulers.answered("b:1")
    await schedulers.lead("a:1")
    await ended(stream)


async def test_a_leader_whose_lease_is_read_while_the_stream_opens_is_no_other_one(
    schedulers: Schedulers,
) -> None:
    await schedulers.lead("b:1")
    await schedulers.read(2)
    stream = await schedulers.open("b:1", changes=1)
    await schedulers.read(2)
    assert not stream.done()
    stream.cancel()


@pytest.mark.parametrize("answers", [True, False])
async def test_a_leader_at_the_former_address_gets_a_new_stream(
    schedulers: Schedulers, answers: bool
) -> None:
    """The former process may be gone without an end of its stream."""
    stream = await schedulers.open("a:1")
    if answers:
        schedulers.answered("a:1")
    await schedulers.lead("a:1")
    await schedulers.read(2)
    if answers:
        await ended(stream)
        return
    assert not stream.done()  # it may be the stream to the new process
    stream.cancel()
