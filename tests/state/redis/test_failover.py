"""The store on servers that Sentinels watch, and the servers that it refuses. All are real."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from millrace.core.config import StoreConfig
from millrace.state.redis import pools
from millrace.state.redis.leases import RedisLeases
from millrace.state.redis.pools import shown_url
from millrace.state.redis.store import RedisStore
from millrace.state.store import JournalEntry, StoreError
from support.deadlines import HANG_S
from support.redis_servers import HOST, PRIMARY, REPLICA, SENTINEL, SERVICE, redis_server, watched
from support.stores import in_the_end

IDS = np.arange(5, dtype=np.int32)


def entry(start: int) -> JournalEntry:
    return JournalEntry(request_id="a", choice=0, start=start, token_ids=[1, 2])


@pytest.mark.parametrize("passwords", [(), ("secret", "hidden")])
async def test_the_store_goes_on_at_the_server_that_was_promoted(passwords: tuple[str]) -> None:
    async with watched(*passwords) as servers:
        config = StoreConfig(url=servers.url)
        store, leases = RedisStore(config), RedisLeases(config)
        await store.create("a", spec=b"s", prompt_ids=IDS)
        await store.append_tokens([entry(0)])
        lease = await leases.acquire("scheduler", address="here", ttl_s=HANG_S)
        assert lease is not None
        await servers.replicated()
        await servers.kill_primary()
        _, said = await in_the_end(lambda: store.create("b", spec=b"", prompt_ids=IDS))
        await store.append_tokens([entry(2)])
        assert (await store.journal("a", 0)).tolist() == [1, 2, 1, 2]
        assert (await store.prompt_ids("b")).tolist() == IDS.tolist()
        # This client asks the Sentinels again: one of them may not know of the promotion yet.
        renewed, _ = await in_the_end(
            lambda: leases.renew("scheduler", epoch=lease.epoch, ttl_s=HANG_S, note=b"")
        )
        assert renewed
        assert (await servers.replica.info("replication"))["role"] == "master"
        assert said and all(
            one.startswith(f"request store {shown_url(servers.url)}: ") for one in said
        )
        assert not any(word in one for one in said for word in (*passwords, "<redis"))
        await store.close()
        await leases.close()


async def test_a_server_that_was_demoted_is_left_though_it_answers() -> None:
    """Its connections stay open: nothing but its refusal to write tells what it has become."""
    async with watched() as servers:
        store = RedisStore(StoreConfig(url=servers.url))
        await store.create("a", spec=b"", prompt_ids=IDS)
        await servers.replicated()
        await servers.replica.replicaof("NO", "ONE")
        await servers.primary.replicaof(HOST, REPLICA)
        with pytest.raises(StoreError, match="replica"):
            await store.create("b", spec=b"", prompt_ids=IDS)
        await servers.sentinel.sentinel_remove(SERVICE)
        await servers.sentinel.sentinel_monitor(SERVICE, HOST, REPLICA, 1)
        await in_the_end(lambda: store.create("b", spec=b"", prompt_ids=IDS))
        assert await servers.replica.exists("millrace:request:{b}")
        await store.close()


async def test_what_sentinels_can_not_name_is_an_error() -> None:
    async with watched(of_sentinel="hidden") as servers:
        wrong = servers.url.replace("hidden", "wrong"), servers.url.replace("/millrace/", "/other/")
        for url, message in zip(
            wrong, ("AuthenticationError", "of 'other' that is up"), strict=True
        ):
            store = RedisStore(StoreConfig(url=url))
            with pytest.raises(StoreError, match=message) as info:
                await store.ping()
            assert not any(word in str(info.value) for word in ("hidden", "wrong", "<redis"))
            await store.close()


async def test_silent_sentinels_are_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes all the time of a call: the next call asks the one after it first."""
    monkeypatch.setattr(pools, "SENTINEL_TIMEOUT_S", 2 * HANG_S)
    async with watched() as servers, await asyncio.start_server(_swallow, HOST, SENTINEL + 2):
        silent = ",".join([f"{HOST}:{SENTINEL + 2}"] * 3)
        url = servers.url.replace("redis+sentinel://", f"redis+sentinel://{silent},")
        store = RedisStore(StoreConfig(url=url, timeout_s=0.5))
        await in_the_end(lambda: store.create("a", spec=b"", prompt_ids=IDS))
        await store.close()


async def _swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()
    writer.close()


async def refusal(port: int) -> str:
    store = RedisStore(StoreConfig(url=f"redis://{HOST}:{port}"))
    with pytest.raises(StoreError) as info:
        await store.ping()
    await store.close()
    return str(info.value)


async def test_replicas_and_sentinels_are_no_store() -> None:
    async with watched():
        assert "this is a replica, which takes no writes" in await refusal(REPLICA)
        assert "name it in a redis+sentinel:// URL" in await refusal(SENTINEL)


async def test_a_server_of_a_cluster_is_no_store_alone() -> None:
    async with redis_server(PRIMARY, "cluster-enabled yes"):
        assert "name it in a redis+cluster:// URL" in await refusal(PRIMARY)


async def test_a_server_that_does_not_tell_its_kind_is_taken() -> None:
    """HELLO is new in Redis 6, and may be forbidden."""
    async with redis_server(PRIMARY, 'rename-command HELLO ""'):
        store = RedisStore(StoreConfig(url=f"redis://{HOST}:{PRIMARY}"))
        await store.create("a", spec=b"", prompt_ids=IDS)
        await store.close()
