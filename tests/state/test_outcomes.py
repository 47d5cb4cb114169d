"""What became of the last requests, on a real redis-server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

from millrace.core.config import StoreConfig
from millrace.state import outcomes
from millrace.state.open import open_outcomes
from millrace.state.outcomes import RedisOutcomes
from millrace.state.store import StoreError
from support.stores import private_redis


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with private_redis() as found:
        yield found


def opened(url: str, group: str = "") -> RedisOutcomes:
    store = open_outcomes(StoreConfig(url=url), group)
    assert store is not None
    return store


async def test_the_last_entries_stay_in_order(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outcomes, "PAGE", 3)
    store = opened(url)
    assert [one async for one in store.outcomes()] == []
    for first in range(0, 12, 4):
        await store.add_outcomes([b"%d" % i for i in range(first, first + 4)], 10)
    await store.add_outcomes([], 10)
    assert [one async for one in store.outcomes()] == [b"%d" % i for i in range(2, 12)]
    await store.add_outcomes([b"%d" % i for i in range(30)], 2)
    assert [one async for one in store.outcomes()] == [b"28", b"29"]
    assert [one async for one in store.samples()] == []
    await store.add_samples([b"a", b"b"], 1)
    assert [one async for one in store.samples()] == [b"b"]
    await store.close()


async def test_every_fleet_has_its_own(url: str) -> None:
    one, other = opened(url), opened(url, "other")
    await one.add_outcomes([b"a"], 10)
    await other.add_outcomes([b"b"], 10)
    assert [text async for text in one.outcomes()] == [b"a"]
    assert [text async for text in other.outcomes()] == [b"b"]
    assert await other.groups() == ["", "other"]
    for store in (one, other):
        await store.close()


async def test_a_fleet_that_is_no_more_is_forgotten(url: str) -> None:
    store = opened(url)
    await store.add_outcomes([b"a"], 10)
    async with Redis.from_url(url) as client:
        [key] = await client.keys("*")
        assert 0 < await client.ttl(key) <= outcomes.LIFETIME_S
    await store.close()


async def test_a_store_out_of_reach_is_an_error() -> None:
    store = opened("redis://127.0.0.1:1")
    with pytest.raises(StoreError):
        await store.add_outcomes([b"a"], 10)
    with pytest.raises(StoreError):
        [one async for one in store.outcomes()]
    await store.close()


def test_a_store_within_one_process_keeps_none() -> None:
    assert open_outcomes(StoreConfig(), "") is None
