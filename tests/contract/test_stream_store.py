"""What every StreamStore does, in memory, on a real redis-server and on a cluster."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from millrace.core.config import StoreConfig
from millrace.state.open import open_streams
from millrace.state.store import IdTaken
from millrace.state.streams import (
    Hold,
    Lease,
    MemoryStreams,
    StreamRecord,
    StreamStore,
    new_fence,
    owner_number,
)
from support.stores import chosen_redis, patient

LONG = Lease(held_s=60.0, wanted_s=60.0)
OVER = Lease(held_s=0.0, wanted_s=60.0)


@pytest.fixture(params=["memory", "redis", "cluster"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[StreamStore]:
    if request.param == "memory":
        opened = open_streams(StoreConfig())
        yield opened
        await opened.close()
        return
    async with chosen_redis(request, "proxy") as url:
        opened = open_streams(patient(url))
        yield opened
        await opened.close()


async def create(store: StreamStore, lease: Lease = LONG, *, ttl_s: float = 60.0) -> None:
    fields = {"tenant": "acme", "source": b"\x00so", "body": b"1", "lease": lease, "ttl_s": ttl_s}
    await store.create("s", **fields, fence=1)


async def found(store: StreamStore) -> StreamRecord:
    record = await store.get("s")
    assert record is not None
    return record


async def test_a_new_stream_reads_back(store: StreamStore) -> None:
    assert await store.get("s") is None
    await create(store)
    record = await found(store)
    assert record == StreamRecord(
        **{"tenant": "acme", "source": b"\x00so", "body": b"1", "fence": 1},
        **{"final": False, "left_s": record.left_s, "age_s": record.age_s},
    )
    assert not record.lost
    with pytest.raises(IdTaken):
        await create(store)


async def test_its_owner_deletes_the_stream_of_its_own_source_alone(store: StreamStore) -> None:
    await create(store)
    assert not await store.delete("s", 1, b"another")
    assert not await store.delete("s", 2, b"\x00so")
    assert await store.delete("s", 1, b"\x00so")
    assert not await store.delete("s", 1, b"\x00so")
    assert await store.get("s") is None
    await create(store)  # its id is free
    assert await store.finish("s", 1, b"", 60.0)
    assert not await store.delete("s", 1, b"\x00so")


async def test_its_owner_changes_it_and_nobody_adopts_it(store: StreamStore) -> None:
    await create(store)
    assert await store.renew("s", 1, b"2", LONG) is Hold.HELD
    assert (await found(store)).body == b"2"
    assert not await store.adopt("s", 1, LONG)


async def test_a_lost_stream_has_one_adopter_and_its_former_owner_is_cut_off(
    store: StreamStore,
) -> None:
    await create(store, OVER)
    assert (await found(store)).lost
    adopted = await asyncio.gather(*(store.adopt("s", 1, LONG) for _ in range(5)))
    assert sorted(adopted) == [False] * 4 + [True]
    assert await store.renew("s", 1, b"late", LONG) is Hold.LOST
    assert not await store.finish("s", 1, b"late", 60.0)
    record = await found(store)
    assert (record.body, record.fence, record.final, record.lost) == (b"1", 2, False, False)
    assert await store.renew("s", 2, b"2", LONG) is Hold.HELD


async def test_fences_of_two_streams_of_one_id_have_nothing_in_common(store: StreamStore) -> None:
    """The store lost the first one, or its owner removed it; that owner does not know yet."""
    former, fence = new_fence(), new_fence()
    fields = {"tenant": "acme", "source": b"so", "body": b"1", "lease": OVER, "ttl_s": 60.0}
    await store.create("s", **fields, fence=fence)
    assert await store.renew("s", former, b"late", OVER) is Hold.LOST
    assert not await store.delete("s", former, b"so")
    assert not await store.adopt("s", former, LONG)
    for number in (1, 2, 3):
        record = await found(store)
        assert record.fence == fence + number - 1 and owner_number(record.fence) == number
        assert await store.renew("s", record.fence, b"2", OVER) is Hold.HELD
        assert await store.adopt("s", record.fence, OVER)


async def test_an_owner_that_comes_back_before_an_adopter_keeps_the_stream(
    store: StreamStore,
) -> None:
    await create(store, OVER)
    assert await store.renew("s", 1, b"2", LONG) is Hold.HELD
    assert not await store.adopt("s", 1, LONG)


async def test_an_adopter_that_knows_of_the_owners_death_needs_no_lapse(
    store: StreamStore,
) -> None:
    await create(store, Lease(held_s=1000.0))
    assert 500 < (await found(store)).left_s <= 1000
    assert not await store.adopt("s", 1, LONG, left_s=100.0)  # its owner has renewed since
    assert await store.adopt("s", 1, LONG, left_s=1000.0)
    assert await store.renew("s", 1, b"late", LONG) is Hold.LOST
    assert 0 < (await found(store)).left_s <= 60


async def test_a_final_stream_stays(store: StreamStore) -> None:
    await create(store, OVER)
    assert await store.finish("s", 1, b"end", 60.0)
    assert await store.finish("s", 1, b"end", 60.0)  # its owner may not have heard of the first
    assert not await store.finish("s", 1, b"another", 60.0)
    assert await store.renew("s", 1, b"2", LONG) is Hold.LOST
    assert not await store.adopt("s", 1, LONG)
    record = await found(store)
    assert (record.body, record.final, record.lost) == (b"end", True, False)


async def test_a_stream_is_unwanted_until_a_client_reads_it(store: StreamStore) -> None:
    absent = Lease(held_s=60.0)
    await create(store, absent)
    assert await store.renew("s", 1, b"1", absent) is Hold.UNWANTED
    await store.want("s", 60.0)
    assert await store.renew("s", 1, b"1", absent) is Hold.HELD
    await store.want("s", 0.0)  # another reader leaves earlier: the first still reads
    assert await store.renew("s", 1, b"1", absent) is Hold.HELD


async def test_nothing_brings_a_deleted_stream_back(store: StreamStore) -> None:
    await create(store)
    assert await store.finish("s", 1, b"", 0.0)
    await store.want("s", 60.0)
    assert await store.renew("s", 1, b"2", LONG) is Hold.GONE
    assert not await store.adopt("s", 1, LONG)
    assert await store.get("s") is None
    await create(store)


async def test_lifetimes_follow_the_clock() -> None:
    now_s = 0.0
    store = MemoryStreams(clock=lambda: now_s)
    await create(store, Lease(held_s=5.0, wanted_s=8.0), ttl_s=20.0)
    now_s = 5.0
    assert (await found(store)).lost
    now_s = 8.0
    assert await store.renew("s", 1, b"2", Lease(held_s=5.0)) is Hold.UNWANTED
    now_s = 20.0
    assert await store.get("s") is None
