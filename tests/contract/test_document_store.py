"""What every DocumentStore does, in memory, on a real redis-server and on a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from millrace.core.config import StoreConfig
from millrace.state.documents import Change, Document, DocumentStore, MemoryDocuments
from millrace.state.open import open_documents
from support.stores import chosen_redis, patient, private_redis


@pytest.fixture(params=["memory", "redis", "cluster"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[DocumentStore]:
    if request.param == "memory":
        opened = open_documents(StoreConfig())
        yield opened
        await opened.close()
        return
    async with chosen_redis(request, "proxy") as url:
        opened = open_documents(patient(url))
        yield opened
        await opened.close()


async def create(store: DocumentStore, change: Change, *, ttl_s: float = 60.0) -> None:
    await store.create("d", tenant="acme", source=b"\x00source", change=change, ttl_s=ttl_s)


async def test_a_new_document_reads_back(store: DocumentStore) -> None:
    assert await store.get("d") is None
    await create(store, Change(body=b"one", lease_s=60.0))
    assert await store.get("d") == Document(
        tenant="acme", body=b"one", source=b"\x00source", final=False, lost=False
    )
    assert await store.events("d", 0) == []


async def test_a_change_replaces_the_body_and_appends_events(store: DocumentStore) -> None:
    await create(store, Change(body=b"one", events=[b"0"], lease_s=60.0))
    assert await store.update("d", Change(body=b"two", first_event=1, events=[b"1", b"2"]))
    found = await store.get("d")
    assert found is not None and found.body == b"two"
    assert await store.events("d", 0) == [b"0", b"1", b"2"]
    assert await store.events("d", 2) == [b"2"]
    assert await store.events("d", 3) == []


async def test_a_change_that_is_made_twice_appends_its_events_once(store: DocumentStore) -> None:
    await create(store, Change(body=b"one", lease_s=60.0))
    await store.update("d", Change(body=b"two", events=[b"0", b"1"]))
    await store.update("d", Change(body=b"two", events=[b"0", b"1"]))
    await store.update("d", Change(body=b"two", events=[b"0", b"1", b"2"]))
    assert await store.events("d", 0) == [b"0", b"1", b"2"]


async def test_a_change_of_another_body_is_not_made(store: DocumentStore) -> None:
    await create(store, Change(body=b"one", lease_s=60.0))
    assert await store.update("d", Change(body=b"two", expected=b"one", events=[b"0"]))
    assert not await store.update("d", Change(body=b"three", expected=b"one", events=[b"0", b"1"]))
    found = await store.get("d")
    assert found is not None and found.body == b"two"
    assert await store.events("d", 0) == [b"0"]
    assert await store.update("d", Change(body=b"", expected=b"two", first_event=1))
    assert not await store.update("d", Change(body=b"x", expected=b"two"))
    assert await store.update("d", Change(body=b"x", expected=b""))
    assert not await store.update("none", Change(body=b"x", expected=b""))


async def test_the_first_final_state_stays(store: DocumentStore) -> None:
    await create(store, Change(body=b"one", lease_s=60.0))
    assert await store.update("d", Change(body=b"cancelled", final=True))
    assert not await store.update("d", Change(body=b"done", events=[b"0"], final=True))
    found = await store.get("d")
    assert found is not None
    assert (found.body, found.final, found.lost) == (b"cancelled", True, False)
    assert await store.events("d", 0) == []


async def test_a_document_is_lost_without_its_lease_until_it_is_renewed(
    store: DocumentStore,
) -> None:
    await create(store, Change(body=b"one", lease_s=0.0))
    found = await store.get("d")
    assert found is not None and found.lost
    assert await store.update("d", Change(body=b"one", lease_s=60.0))
    found = await store.get("d")
    assert found is not None and not found.lost


async def test_a_deleted_document_never_comes_back(store: DocumentStore) -> None:
    await create(store, Change(body=b"one", events=[b"0"], lease_s=60.0))
    await store.delete("d")
    await store.delete("d")
    assert not await store.update("d", Change(body=b"two", events=[b"0"]))
    assert await store.get("d") is None
    assert await store.events("d", 0) == []


async def test_a_document_in_memory_expires_with_its_events() -> None:
    now_s = 0.0
    store = MemoryDocuments(clock=lambda: now_s)
    await create(store, Change(body=b"one", events=[b"0"], lease_s=60.0), ttl_s=60.0)
    now_s = 59.0
    assert await store.events("d", 0) == [b"0"]
    now_s = 60.0
    assert await store.get("d") is None
    assert await store.events("d", 0) == []
    assert not await store.update("d", Change(body=b"two"))


async def test_redis_expires_a_document_and_its_events_together() -> None:
    async with private_redis() as url:
        store = open_documents(patient(url))
        await create(store, Change(body=b"one", lease_s=60.0), ttl_s=60.0)
        assert await store.update("d", Change(body=b"two", events=[b"0"]))
        async with Redis.from_url(url) as client:
            lives_ms = [await client.pttl(key) for key in await client.keys("*")]
        assert len(lives_ms) == 2
        assert all(0 < life_ms <= 60_000 for life_ms in lives_ms)
        await store.close()
