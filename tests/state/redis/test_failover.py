"""The store on servers that Sentinels watch, and the servers that it refuses. All are real."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np
import pytest

from millrace.core.config import StoreConfig
from millrace.core.errors import ConfigError
from millrace.state.open import in_memory, open_store
from millrace.state.redis import pools
from millrace.state.redis.leases import RedisLeases
from millrace.state.redis.pools import pool_of, shown_url
from millrace.state.redis.store import RedisStore
from millrace.state.store import JournalEntry, StoreError
from support.deadlines import HANG_S
from support.redis_servers import HOST, PRIMARY, REPLICA, SENTINEL, SERVICE, redis_server, watched

IDS = np.arange(5, dtype=np.int32)
T = TypeVar("T")


def entry(start: int) -> JournalEntry:
    return JournalEntry(request_id="a", choice=0, start=start, token_ids=[1, 2])


async def in_the_end(call: Callable[[], Awaitable[T]]) -> tuple[T, set[str]]:
    """Calls until no StoreError is raised; returns the answer, and what the errors said."""
    said: set[str] = set()
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                return await call(), said
            except StoreError as error:
                said.add(str(error))
                await asyncio.sleep(0.01)


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


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("redis+sentinel://h", "the service that the Sentinels watch is missing"),
        ("redis+sentinel://h:1,i:2/", "the service that the Sentinels watch is missing"),
        ("redis+sentinel://h,,i/s", "'' is no address of a Sentinel"),
        ("redis+sentinel://h:99999/s", "Port out of range"),
        ("redis+sentinel://h:x/s", "Port could not be cast"),
        ("redis+sentinel://h/s/first", "the database after /s/ is 'first'; it must be a number"),
        ("redis+sentinel://h/s?colour=red", "an option after the question mark is unknown"),
        ("redis+sentinel://h/s?ssl_colour=red", "an option after the question mark is unknown"),
        ("redis+sentinel://h/s?socket_timeout=soon", "socket_timeout"),
        ("redis://h/0?colour=red", "an option after the question mark is unknown"),
        ("redis+sentinel://u:hunter2@h/s/x", "the database after /s/ is 'x'"),
    ],
)
def test_urls_of_sentinels_that_make_no_sense(url: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.url is 'redis") as info:
        open_store(StoreConfig(url=url))
    assert message in str(info.value) and "hunter2" not in str(info.value)


def test_a_url_names_sentinels_database_user_and_tls() -> None:
    url = (
        "rediss+sentinel://me:p%40x@a,[::1]:7/s/3?sentinel_username=you&sentinel_password=q"
        "&ssl_ca_certs=ca.crt&max_connections=5"
    )
    assert not in_memory(StoreConfig(url=url))
    assert shown_url(url) == "rediss+sentinel://a,[::1]:7/s/3"
    options = {"retry": None, "protocol": 2, "driver_info": None}
    pool = pool_of(url, options)
    made = pool.make_connection()
    assert pool.max_connections == 5
    assert (made.db, made.username, made.password, made.ca_certs) == (3, "me", "p@x", "ca.crt")
    asked = [one.connection_pool.connection_kwargs for one in pool.sentinel_manager.sentinels]
    assert [(one["host"], one["port"]) for one in asked] == [("a", 26379), ("::1", 7)]
    for one in asked:
        assert (one["username"], one["password"], one["ssl_ca_certs"]) == ("you", "q", "ca.crt")
