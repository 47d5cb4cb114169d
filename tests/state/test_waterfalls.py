"""The waterfalls of requests that ended, on a real redis-server."""

from __future__ import annotations

import pytest
from redis.asyncio import Redis

from millrace.core.config import StoreConfig
from millrace.state.open import open_begun_waterfalls, open_waterfalls
from millrace.state.store import StoreError
from support.stores import private_redis


async def test_waterfalls_are_found_in_the_order_of_the_ids() -> None:
    async with private_redis("proxy") as url:
        store = open_waterfalls(StoreConfig(url=url))
        assert store is not None
        assert await store.find([]) == []
        await store.put({})
        await store.put({"a": b"one", "b": b"\x00\xff", "c": b"three"})
        await store.put({"c": b"four"})
        assert await store.find(["c", "nothing", "b"]) == [b"four", None, b"\x00\xff"]
        await store.remove([])
        await store.remove(["c", "nothing"])
        assert await store.find(["a", "c"]) == [b"one", None]
        await store.close()


@pytest.mark.parametrize("lifetime_s", [0.0, 60.0])
async def test_they_live_as_long_as_records_of_ended_requests(lifetime_s: float) -> None:
    async with private_redis() as url, Redis.from_url(url) as client:
        store = open_waterfalls(StoreConfig(url=url, finished_ttl_s=lifetime_s))
        assert store is not None
        await store.put({"a": b"one"})
        lifetimes = [await client.pttl(key) for key in await client.keys("*")]
        assert len(lifetimes) == (1 if lifetime_s else 0)
        assert all(0 < left_ms <= 60_000 for left_ms in lifetimes)
        await store.close()


async def test_those_of_open_streams_live_as_long_as_the_streams() -> None:
    async with private_redis("proxy") as url:
        config = StoreConfig(url=url, ttl_s=600.0)
        begun, ended = open_begun_waterfalls(config), open_waterfalls(config)
        assert begun is not None and ended is not None
        await begun.put({"a": b"begun"})
        await ended.put({"a": b"ended"})
        assert [*await begun.find(["a"]), *await ended.find(["a"])] == [b"begun", b"ended"]
        await begun.close()
        await ended.close()
    async with private_redis() as url, Redis.from_url(url) as client:
        begun = open_begun_waterfalls(StoreConfig(url=url, ttl_s=600.0))
        assert begun is not None
        await begun.put({"a": b"begun"})
        assert 60_000 < await client.pttl("millrace:begun_waterfall:a") <= 600_000
        await begun.close()


async def test_a_store_out_of_reach_is_an_error() -> None:
    store = open_waterfalls(StoreConfig(url="redis://127.0.0.1:1"))
    assert store is not None
    for call in (store.find(["a"]), store.put({"a": b"one"}), store.remove(["a"])):
        with pytest.raises(StoreError):
            await call
    await store.close()


def test_a_store_within_one_process_shares_nothing() -> None:
    assert open_waterfalls(StoreConfig()) is None
    assert open_begun_waterfalls(StoreConfig()) is None
