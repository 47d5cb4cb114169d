"""The users of the services on a real redis-server: each does its part, and nothing else.

The contract tests of the stores run under these users, too.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoPermissionError

from millrace import state
from millrace.cli.doctor.findings import FAILURE
from millrace.cli.doctor.store import store as checked
from millrace.core.config import StoreConfig
from millrace.state.outcomes import RedisOutcomes
from millrace.state.redis.access import RIGHTS, acl_file, rules_of, user_of
from millrace.state.redis.leases import RedisLeases
from millrace.state.redis.store import RedisStore
from millrace.state.store import JournalEntry, StateUpdate, StoreError
from support.redis_servers import HOST, PRIMARY, redis_server
from support.stores import PASSWORD, add_users, as_service, private_redis

IDS = np.arange(5, dtype=np.int32)
#: What no service may do.
ADMINISTRATION = (
    ("FLUSHALL",),
    ("KEYS", "*"),
    ("CONFIG", "GET", "requirepass"),
    ("ACL", "LIST"),
    ("CLIENT", "LIST"),
    ("SCRIPT", "FLUSH"),
    ("EVAL", "return 1", "0"),
    ("MONITOR",),
    ("SHUTDOWN",),
    ("PUBLISH", "a", "b"),
    ("HMGET", "other:request:{a}", "spec"),
)
#: What others may do, and it may not.
FOREIGN = {
    "proxy": [("LPOP", "millrace:document:{a}:events"), ("GET", "millrace:request:{a}:prompt")],
    "scheduler": [
        ("GETRANGE", "millrace:request:{a}:prompt", "0", "-1"),
        ("HSET", "millrace:tenants", "a", "b"),
        ("HMGET", "millrace:stream:{a}", "source"),
        ("HMGET", "millrace:document:{a}", "source"),
    ],
    "prefill": [
        ("APPEND", "millrace:request:{a}:prompt", "x"),
        ("HSET", "millrace:lease:scheduler", "epoch", "1"),
        ("HMGET", "millrace:request:{a}", "spec"),
        ("GETRANGE", "millrace:request:{a}:journal", "0", "-1"),
        ("EVALSHA", "0" * 40, "0"),
        ("SCAN", "0"),
    ],
    "decode": [
        ("SET", "millrace:request:{a}:prompt", "x"),
        ("HSET", "millrace:request:{a}", "spec", "x"),
        ("HSET", "millrace:lease:scheduler", "epoch", "1"),
        ("HMGET", "millrace:stream:{a}", "source"),
        ("HGETALL", "millrace:tenants"),
    ],
    "kvp": [
        ("GETRANGE", "millrace:request:{a}:prompt", "0", "-1"),
        ("HSET", "millrace:lease:scheduler", "epoch", "1"),
        ("HMGET", "millrace:request:{a}", "spec"),
    ],
    "tools": [
        ("HMGET", "millrace:lease:scheduler", "epoch"),
        ("RPUSH", "millrace:scheduler:outcomes", "a"),
    ],
}


@pytest.fixture
async def url() -> AsyncIterator[str]:
    """Of a server with all users, by an administrator."""
    async with private_redis() as address:
        async with Redis.from_url(address) as client:
            await add_users(client)
        yield address


@asynccontextmanager
async def opened(url: str, service: str) -> AsyncIterator[tuple[RedisStore, RedisLeases]]:
    config = StoreConfig(url=as_service(url, service))
    store, leases = RedisStore(config), RedisLeases(config)
    yield store, leases
    await store.close()
    await leases.close()


async def test_every_service_does_its_part(url: str) -> None:
    async with (
        opened(url, "proxy") as (proxy, of_proxy),
        opened(url, "scheduler") as (scheduler, of_scheduler),
        opened(url, "prefill") as (prefill, of_prefill),
        opened(url, "decode") as (decode, of_decode),
        opened(url, "kvp") as (_, of_kvp),
    ):
        lease = await of_scheduler.acquire("scheduler", address="here:1", ttl_s=60.0)
        assert lease is not None
        assert await of_scheduler.renew("scheduler", epoch=lease.epoch, ttl_s=60.0, note=b"n")
        for reader in (of_proxy, of_scheduler, of_prefill, of_decode, of_kvp):
            found = await reader.read("scheduler")
            assert found is not None
            assert (found.epoch, found.address, found.note) == (lease.epoch, "here:1", b"n")
            assert 0 < found.left_s <= 60
            assert await reader.read("none") is None
        await proxy.create("a", spec=b"s", prompt_ids=IDS)
        for reads in (prefill, decode):
            assert (await reads.prompt_ids("a", 0, 5)).tolist() == IDS.tolist()
        assert len(await prefill.prompt_slices("a", [(0, 2), (3, 4)])) == 2
        await scheduler.set_states([StateUpdate(request_id="a", state="decoding", decode_id="d")])
        entry = JournalEntry(request_id="a", choice=0, start=0, token_ids=[1, 2])
        await decode.append_tokens([entry])
        assert (await proxy.journal("a", 0)).tolist() == [1, 2]
        await scheduler.finish({"a": "finished"})
        await of_scheduler.release("scheduler", epoch=lease.epoch)
    tools, writer = (StoreConfig(url=as_service(url, one)) for one in ("tools", "scheduler"))
    written, read = RedisOutcomes(writer, "g"), RedisOutcomes(tools, "g")
    await written.add_outcomes([b"a"], 10)
    assert [one async for one in read.outcomes()] == [b"a"] and await read.groups() == ["g"]
    for one in (written, read):
        await one.close()
    findings = [one async for one in checked(tools)]
    assert len(findings) > 2 and not any(one.level == FAILURE for one in findings), findings


@pytest.mark.parametrize("service", RIGHTS)
async def test_no_service_does_the_part_of_another(url: str, service: str) -> None:
    async with Redis.from_url(as_service(url, service)) as client:
        for command in (*ADMINISTRATION, *FOREIGN[service]):
            with pytest.raises(NoPermissionError):
                await client.execute_command(*command)


def test_somebody_has_a_right_to_every_kind_of_key() -> None:
    """A new kind needs one, too."""
    kinds: set[str] = set()
    for path in Path(state.__file__).parent.rglob("*.py"):
        kinds.update(re.findall(r'key_of\([\w.]*prefix, "(\w+)"', path.read_text()))
    assert {"request", "lease", "tenants"} < kinds
    keys = {key for rights in RIGHTS.values() for key in rights.keys}
    assert kinds <= {key.partition(":")[0] for key in keys}


async def test_a_store_says_what_its_user_may_not_do(url: str) -> None:
    async with opened(url, "kvp") as (store, _):
        with pytest.raises(StoreError, match="permissions"):
            await store.create("a", spec=b"", prompt_ids=IDS)


async def test_an_aclfile_lets_nobody_else_in(tmp_path: Path) -> None:
    file = tmp_path / "users.acl"
    file.write_text(acl_file(dict.fromkeys(RIGHTS, PASSWORD), "mill-1"))
    assert PASSWORD not in file.read_text()
    port = f"{HOST}:{PRIMARY}"
    user = user_of("proxy", "mill-1")
    async with _with_file(file):
        for wrong in (f"redis://{port}", f"redis://:x@{port}", f"redis://{user}:x@{port}"):
            store = RedisStore(StoreConfig(url=wrong, key_prefix="mill-1"))
            with pytest.raises(StoreError):
                await store.ping()
            await store.close()
        config = StoreConfig(url=f"redis://{user}:{PASSWORD}@{port}/0", key_prefix="mill-1")
        store = RedisStore(config)
        await store.create("a", spec=b"", prompt_ids=IDS)
        await store.close()


@asynccontextmanager
async def _with_file(file: Path) -> AsyncIterator[None]:
    """A server whose users are those of an aclfile; a client that is one of them pings it."""
    user = user_of("kvp", "mill-1")
    async with redis_server(PRIMARY, f"aclfile {file}", user=user, user_password=PASSWORD):
        yield


def keys_of(rules: Sequence[str]) -> list[str]:
    return [rule for rule in rules if rule.startswith("~")]


async def test_a_prefix_is_no_pattern(url: str) -> None:
    assert keys_of(rules_of("kvp", "a*[b]?", "p")) == [r"~a\*\[b\]\?:lease:*"]
    async with Redis.from_url(url) as client:
        await client.execute_command("ACL", "SETUSER", "u", *rules_of("kvp", "a*", PASSWORD))
    named = url.replace("unix://", f"unix://u:{PASSWORD}@")
    async with Redis.from_url(named) as client:
        assert await client.hmget("a*:lease:x", "epoch") == [None]
        with pytest.raises(NoPermissionError):
            await client.hmget("ab:lease:x", "epoch")


async def test_new_rules_take_old_ones_away(url: str) -> None:
    async with Redis.from_url(url) as client:
        await client.execute_command("ACL", "SETUSER", "millrace-kvp", "allkeys", "+@all", ">old")
        await add_users(client)
    async with Redis.from_url(as_service(url, "kvp")) as client:
        with pytest.raises(NoPermissionError):
            await client.get("a")
    async with Redis.from_url(url.replace("unix://", "unix://millrace-kvp:old@")) as client:
        with pytest.raises(RedisConnectionError, match="invalid username-password"):
            await client.ping()
