"""Leader election, with a clock of the test's own on an emulated API server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from millrace.core.errors import MillraceError
from millrace_operator.run.election import Election, LeaseLost, Terms
from millrace_operator.run.kube import Kube, KubeRefused
from support.kube_emulator import Fault, KubeEmulator, configuration_of, kube_emulator

TERMS = Terms(lease_s=15.0, renew_s=10.0, retry_s=0.01)


class Clock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
async def cluster() -> AsyncIterator[KubeEmulator]:
    async with kube_emulator() as emulator:
        yield emulator


@pytest.fixture
async def kube(cluster: KubeEmulator) -> AsyncIterator[Kube]:
    client = Kube(configuration_of(cluster))
    yield client
    await client.close()


def candidate(kube: Kube, identity: str, clock: Clock) -> Election:
    return Election(
        kube, namespace="default", name="op", identity=identity, terms=TERMS, clock=clock
    )


def spec(cluster: KubeEmulator) -> dict[str, object]:
    return cluster.find("Lease", "op")["spec"]


async def gives_up(election: Election) -> bool:
    """Returns whether it does not lead after several attempts."""
    try:
        async with asyncio.timeout(0.1):
            await election.acquire()
    except TimeoutError:
        return True
    return False


async def test_one_leads_and_the_lease_says_so(cluster: KubeEmulator, kube: Kube):
    clock = Clock()
    first, second = candidate(kube, "a", clock), candidate(kube, "b", clock)
    assert not first.in_order()
    await first.acquire()
    assert first.may_act() and await gives_up(second)
    assert second.in_order() and not second.may_act()
    found = spec(cluster)
    assert (found["holderIdentity"], found["leaseDurationSeconds"]) == ("a", 15)
    assert found["leaseTransitions"] == 0 and found["acquireTime"] == found["renewTime"]
    assert found["renewTime"].endswith("Z") and len(found["renewTime"]) == 27  # microseconds


async def test_a_silent_leader_is_replaced_after_its_term(cluster: KubeEmulator, kube: Kube):
    """The time counts from when the other candidate saw the record change, by its own clock."""
    old, new = Clock(), Clock()
    first, second = candidate(kube, "a", old), candidate(kube, "b", new)
    await first.acquire()
    new.now_s = 5e6  # clocks are never compared
    assert await gives_up(second)
    new.now_s += 14.0
    assert await gives_up(second)
    new.now_s += 2.0
    await second.acquire()
    assert (spec(cluster)["holderIdentity"], spec(cluster)["leaseTransitions"]) == ("b", 1)
    old.now_s += 1.0
    with pytest.raises(LeaseLost):
        await first.hold()
    assert not first.may_act()
    await first.release()
    assert spec(cluster)["holderIdentity"] == "b"  # b's lease stays


async def test_a_renewal_keeps_the_lease(cluster: KubeEmulator, kube: Kube):
    clock = Clock()
    first, second = candidate(kube, "a", clock), candidate(kube, "b", clock)
    await first.acquire()
    holding = asyncio.create_task(first.hold())
    for _ in range(4):
        assert await gives_up(second)
        before, acquired = spec(cluster)["renewTime"], spec(cluster)["acquireTime"]
        clock.now_s += 5.0
        await cluster.until(lambda before=before: spec(cluster)["renewTime"] != before)
        assert spec(cluster)["acquireTime"] == acquired
    holding.cancel()
    assert first.may_act()
    await first.release()
    assert (spec(cluster)["holderIdentity"], spec(cluster)["leaseDurationSeconds"]) == ("", 1)
    await second.acquire()
    assert not first.may_act()


async def test_a_leader_without_its_api_server_gives_up_in_time(cluster: KubeEmulator, kube: Kube):
    clock = Clock()
    leader = candidate(kube, "a", clock)
    await leader.acquire()
    fault = Fault(500, times=10_000, matches=lambda request: True)
    cluster.faults.append(fault)
    holding = asyncio.create_task(leader.hold())
    clock.now_s += 9.0
    await cluster.until(lambda: fault.hits >= 3)
    assert not holding.done() and leader.may_act()
    clock.now_s += 1.0
    assert not leader.may_act()
    with pytest.raises(LeaseLost):
        await holding


async def test_a_process_that_was_stopped_does_not_act_before_it_has_looked(kube: Kube):
    clock = Clock()
    leader = candidate(kube, "a", clock)
    await leader.acquire()
    clock.now_s += 60.0
    assert not leader.may_act()


async def test_of_two_at_once_one_wins(cluster: KubeEmulator, kube: Kube):
    """The other candidate's write meets a changed resourceVersion, or an existing object."""
    clock = Clock()
    named = {name: candidate(kube, name, clock) for name in "abcd"}
    candidates = list(named.values())
    tries = [asyncio.create_task(one.acquire()) for one in candidates]
    await asyncio.wait(tries, return_when=asyncio.FIRST_COMPLETED)
    await cluster.until(lambda: spec(cluster))
    assert all([await gives_up(one) for one in candidates if not one.leading])
    (winner,) = [name for name, one in named.items() if one.leading]
    assert spec(cluster)["holderIdentity"] == winner
    for task in tries:
        task.cancel()


async def test_lacking_rights_are_told_at_once(cluster: KubeEmulator, kube: Kube):
    cluster.faults.append(Fault(403, matches=lambda request: True))
    with pytest.raises(KubeRefused, match="injected 403"):
        await candidate(kube, "a", Clock()).acquire()


def test_terms_leave_room_for_a_hand_over():
    with pytest.raises(MillraceError):
        Terms(lease_s=10.0, renew_s=10.0, retry_s=2.0)
