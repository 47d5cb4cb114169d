"""What every RecordStore does, in memory, on a real redis-server and on a cluster."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
from redis.asyncio import Redis

from millrace.core.config import StoreConfig
from millrace.state.open import open_deadlines, open_records
from millrace.state.records import Deadlines, MemoryRecords, Record, RecordStore
from millrace.state.redis.records import RedisRecords
from support.stores import chosen_redis, patient, private_redis


@pytest.fixture(params=["memory", "redis", "cluster"])
async def config(request: pytest.FixtureRequest) -> AsyncIterator[StoreConfig]:
    if request.param == "memory":
        yield StoreConfig()
        return
    async with chosen_redis(request, "proxy") as url:
        yield patient(url)


@pytest.fixture
async def store(config: StoreConfig) -> AsyncIterator[RecordStore]:
    opened = open_records(config, "batch")
    yield opened
    await opened.close()


@pytest.fixture
async def deadlines(config: StoreConfig) -> AsyncIterator[Deadlines]:
    opened = open_deadlines(config, "file")
    yield opened
    await opened.close()


async def create(
    store: RecordStore, name: str, at_s: float = 0.0, *, tenant: str = "acme", final: bool = False
) -> None:
    await store.create(name, tenant=tenant, body=b"\x00one", at_s=at_s, ttl_s=600.0, final=final)


async def found(store: RecordStore, name: str = "a") -> Record:
    record = await store.get(name)
    assert record is not None
    return record


async def test_a_new_record_reads_back(store: RecordStore) -> None:
    assert await store.get("a") is None
    await create(store, "a")
    wanted = Record(record_id="a", tenant="acme", body=b"\x00one", version=1, owner="", final=False)
    assert await store.get("a") == wanted
    assert await store.get_many(["b", "a"]) == [None, wanted]
    assert await store.get_many([]) == []


async def test_of_two_changes_to_one_version_one_is_made(store: RecordStore) -> None:
    await create(store, "a")
    old = await found(store)
    assert await store.swap(old, b"two")
    assert not await store.swap(old, b"three")
    new = await found(store)
    assert (new.body, new.version) == (b"two", 2)
    assert await store.swap(new, b"three")
    assert (await found(store)).body == b"three"


async def test_a_final_record_never_changes(store: RecordStore) -> None:
    await create(store, "a")
    assert await store.swap(await found(store), b"end", final=True)
    final = await found(store)
    assert (final.body, final.final) == (b"end", True)
    assert not await store.swap(final, b"more")
    assert await store.claim("a", "me", 60.0) is None
    assert await store.claimable(10) == []


async def test_a_claim_keeps_others_out_until_the_lease_is_over(store: RecordStore) -> None:
    await create(store, "a")
    assert await store.claimable(10) == ["a"]
    mine = await store.claim("a", "me", 60.0)
    assert mine is not None and (mine.owner, mine.version) == ("me", 2)
    assert await store.claimable(10) == []
    assert await store.claim("a", "you", 60.0) is None
    assert not await store.renew("a", "you", 60.0)
    assert await store.renew("a", "me", 0.0)  # the lease is over at once
    yours = await store.claim("a", "you", 60.0)
    assert yours is not None and yours.owner == "you"
    assert not await store.renew("a", "me", 60.0)


@pytest.mark.parametrize("config", ["redis", "cluster"], indirect=True)
@pytest.mark.parametrize("step_s", [3600.0, -3600.0])
async def test_the_proxys_own_clock_means_nothing(
    store: RecordStore, step_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    unix_ns = time.time_ns
    for name in "ab":
        await create(store, name)
    assert await store.claim("a", "me", 60.0) is not None
    with monkeypatch.context() as patched:
        patched.setattr(time, "time_ns", lambda: unix_ns() + round(step_s * 1e9))
        assert await store.claimable(10) == ["b"]
        assert await store.claim("b", "me", 60.0) is not None
    assert await store.claimable(10) == []


async def test_a_clock_of_redis_that_is_set_back_frees_a_record_after_one_more_lease() -> None:
    async with private_redis() as url, Redis.from_url(url) as client, AsyncExitStack() as exits:
        store = RedisRecords(patient(url), "batch")
        exits.push_async_callback(store.close)
        await create(store, "a")
        assert await store.claim("a", "dead", 60.0) is not None
        key, ahead_ms = "millrace:batch:{a}", (int(time.time()) + 3600) * 1000
        await client.hset(key, "lease_until", str(ahead_ms))  # as before the step
        await client.zadd("millrace:batch:open", {"a": ahead_ms / 1000})
        assert await store.claimable(10) == ["a"]
        assert await store.claim("a", "me", 0.0) is None
        assert await store.claim("a", "me", 60.0) is not None


async def test_the_former_owner_can_change_nothing(store: RecordStore) -> None:
    await create(store, "a")
    mine = await store.claim("a", "me", 0.0)
    assert mine is not None
    assert await store.claim("a", "you", 60.0) is not None
    assert not await store.swap(mine, b"mine")
    await store.release("a", "me")
    assert (await found(store)).owner == "you"


async def test_a_released_record_can_be_claimed_at_once(store: RecordStore) -> None:
    await create(store, "a")
    mine = await store.claim("a", "me", 600.0)
    await store.release("a", "me")
    assert await store.claimable(10) == ["a"]
    assert (await found(store)).owner == ""
    yours = await store.claim("a", "you", 600.0)
    assert mine is not None and yours is not None and yours.version > mine.version


async def test_pages_follow_the_time_of_creation(store: RecordStore) -> None:
    for name, at_s in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
        await create(store, name, at_s)
    await create(store, "x", 2.5, tenant="other")

    async def page(after: str | None, count: int, *, newest: bool) -> list[str] | None:
        return await store.page("acme", after=after, count=count, newest_first=newest)

    assert await page(None, 10, newest=True) == ["c", "b", "a"]
    assert await page(None, 2, newest=False) == ["a", "b"]
    assert await page("b", 10, newest=True) == ["a"]
    assert await page("b", 10, newest=False) == ["c"]
    assert await page("c", 10, newest=False) == []
    assert await page("x", 10, newest=False) is None
    assert await page("y", 10, newest=False) is None


async def test_a_deleted_record_is_on_no_list(store: RecordStore) -> None:
    await create(store, "a")
    assert await store.delete("a", "acme")
    assert not await store.delete("a", "acme")
    assert await store.get("a") is None
    assert await store.page("acme", after=None, count=10, newest_first=True) == []
    assert await store.claimable(10) == []


async def test_a_final_record_from_the_start_has_no_owner(store: RecordStore) -> None:
    await create(store, "a", final=True)
    assert await store.claimable(10) == []
    assert (await found(store)).final


async def test_a_record_in_memory_expires() -> None:
    now_s = 0.0
    store = MemoryRecords(clock=lambda: now_s)
    await create(store, "a")
    now_s = 600.0
    assert await store.get("a") is None
    assert await store.claim("a", "me", 60.0) is None
    await create(store, "b", 1.0)
    assert await store.page("acme", after=None, count=10, newest_first=True) == ["b"]


async def test_deadlines_pass_in_order(deadlines: Deadlines) -> None:
    await deadlines.set(["late", "early"], 2.0)
    await deadlines.set(["early"], 1.0)
    await deadlines.set([], 1.0)
    assert await deadlines.passed(1.0, 10) == []
    assert await deadlines.passed(1.5, 10) == ["early"]
    assert await deadlines.passed(9.0, 1) == ["early"]
    await deadlines.forget(["early"])
    await deadlines.forget([])
    assert await deadlines.passed(9.0, 10) == ["late"]
