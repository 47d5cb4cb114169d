"""The parts of RedisStore alone: lifetimes in the server, lost connections, errors, secrets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import quote, unquote

import numpy as np
import pytest
import uvloop
from redis.asyncio import Redis

from millrace.core.config import StoreConfig
from millrace.core.errors import ConfigError
from millrace.local.private_redis import PrivateRedis
from millrace.state.redis.link import RedisLink
from millrace.state.redis.pools import shown_url
from millrace.state.redis.scripts import LARGE_BYTES
from millrace.state.redis.store import RedisStore
from millrace.state.store import JournalEntry, StateUpdate, StoreError
from support.deadlines import HANG_S, eventually
from support.redis_servers import HOST, PRIMARY, redis_server
from support.relay import relay
from support.stores import private_redis

IDS = np.arange(5, dtype=np.int32)


@pytest.fixture
async def url() -> AsyncIterator[str]:
    async with private_redis() as address:
        yield address


def tokens(request_id: str) -> JournalEntry:
    return JournalEntry(request_id=request_id, choice=0, start=0, token_ids=[1, 2])


async def lifetimes_ms(client: Redis) -> dict[str, int]:
    return {key.decode(): await client.pttl(key) for key in await client.keys("*")}


async def test_every_key_has_a_lifetime_and_one_hash_slot(url: str) -> None:
    store = RedisStore(StoreConfig(url=url, ttl_s=100, finished_ttl_s=10, key_prefix="mill"))
    async with Redis.from_url(url) as client:
        await store.create("a", spec=b"", prompt_ids=IDS, kept=True)
        await store.append_tokens([tokens("a"), tokens("a")])
        life = await lifetimes_ms(client)
        stem = "mill:request:{a}"
        assert life.keys() == {stem, f"{stem}:prompt", f"{stem}:journal"}
        assert all(50_000 < ms <= 60_000 for ms in life.values())
        await store.renew(["a"])
        life = await lifetimes_ms(client)
        assert all(90_000 < ms <= 100_000 for ms in life.values())
        await store.finish({"a": "finished"})
        await store.release("a")
        life = await lifetimes_ms(client)
        assert life.keys() == {stem, f"{stem}:journal"}
        assert all(9_000 < ms <= 10_000 for ms in life.values())
        await store.delete("a")
        assert await lifetimes_ms(client) == {}
    await store.close()


async def test_a_request_that_none_may_continue_lives_as_long_as_its_proxy(url: str) -> None:
    store = RedisStore(StoreConfig(url=url))
    async with Redis.from_url(url) as client:
        await store.create("a", spec=b"", prompt_ids=IDS)
        await store.append_tokens([tokens("a")])
        for key, life_ms in (await lifetimes_ms(client)).items():
            assert 50_000 < life_ms <= 60_000
            await client.pexpire(key, 30_000)
        await store.renew(["a"])
        lives = await lifetimes_ms(client)
        assert len(lives) == 3 and all(50_000 < one <= 60_000 for one in lives.values())
    await store.close()


async def test_late_news_of_a_deleted_request_leaves_no_key(url: str) -> None:
    store = RedisStore(StoreConfig(url=url))
    async with Redis.from_url(url) as client:
        await store.create("a", spec=b"", prompt_ids=IDS)
        await store.delete("a")
        await store.set_states([StateUpdate(request_id="a", state="decoding", decode_id="d")])
        await store.append_tokens([tokens("a")])
        await store.finish({"a": "finished"})
        assert await client.dbsize() == 0
    await store.close()


async def test_the_prompt_is_little_endian_int32(url: str) -> None:
    store = RedisStore(StoreConfig(url=url))
    async with Redis.from_url(url) as client:
        await store.create("a", spec=b"", prompt_ids=np.array([1, 258], dtype=np.int32))
        assert await client.get("millrace:request:{a}:prompt") == b"\1\0\0\0\2\1\0\0"
    await store.close()


async def test_scripts_are_loaded_again_after_a_flush(url: str) -> None:
    store = RedisStore(StoreConfig(url=url))
    async with Redis.from_url(url) as client:
        await store.create("a", spec=b"", prompt_ids=IDS)
        await client.script_flush()
        await store.append_tokens([tokens("a"), tokens("b"), tokens("a")])
        assert (await store.journal("a", 0)).tolist() == [1, 2]
    await store.close()


async def test_cut_connections_are_opened_again(url: str) -> None:
    store = RedisStore(StoreConfig(url=url))
    async with Redis.from_url(url) as client:
        await store.create("a", spec=b"", prompt_ids=IDS)
        await client.client_kill_filter(_type="normal", skipme=True)
        await store.append_tokens([tokens("a")])
        await client.client_kill_filter(_type="normal", skipme=True)
        assert (await store.journal("a", 0)).tolist() == [1, 2]
    await store.close()


def test_a_connection_that_ends_before_it_is_used_is_a_lost_one() -> None:
    """On uvloop, as the services run: it has an error of its own for a transport that is closed."""

    async def use() -> None:
        link = RedisLink(StoreConfig(url="redis://127.0.0.1:1"))
        async with await asyncio.start_server(lambda _, writer: writer.close(), HOST, 0) as server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            writer.transport.abort()
            await asyncio.sleep(0)
            answers = iter([lambda: writer.writelines([b"PING"]), lambda: None])

            async def call(_: Redis) -> str:
                next(answers)()
                return "PONG"

            with pytest.raises(StoreError, match="closed"):
                await link.once(b"key", call)
            answers = iter([lambda: writer.writelines([b"PING"]), lambda: None])
            assert await link.again(b"key", call) == "PONG"
        await link.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(use())


@asynccontextmanager
async def cutting(url: str, cuts: int) -> AsyncIterator[str]:
    """Yields the URL of a door to the server at `url`: it closes the first `cuts` connections when
    it has read their first bytes.
    """
    inner = unquote(url.removeprefix("unix://"))
    opened = 0

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        if opened <= cuts:
            await reader.read(1)
            writer.close()
            return
        answers, requests = await asyncio.open_unix_connection(inner)
        await asyncio.gather(relay(reader, requests), relay(answers, writer))

    async with await asyncio.start_unix_server(serve, door := f"{inner}.door"):
        yield f"unix://{quote(door)}"


@pytest.mark.parametrize("cuts", [1, 2])
async def test_every_read_outlives_connections_that_are_cut_before_the_answer(
    url: str, cuts: int
) -> None:
    store = RedisStore(StoreConfig(url=url))
    await store.create("a", spec=b"s", prompt_ids=IDS)
    await store.append_tokens([tokens("a")])
    reads: list[Callable[[RedisStore], Awaitable[object]]] = [
        lambda s: s.prompt_ids("a"),
        lambda s: s.prompt_slices("a", [(0, 1), (1, len(IDS))]),
        lambda s: s.journal("a", 0),
        lambda s: s.get("a"),
        lambda s: s.set_states([StateUpdate(request_id="a", state="queued", decode_id="")]),
    ]
    for read in reads:
        async with cutting(url, cuts) as door:
            behind = RedisStore(StoreConfig(url=door))
            assert repr(await read(behind)) == repr(await read(store))
            await behind.close()
    await store.close()


async def test_a_call_that_is_cancelled_at_any_step_ends_as_cancelled(url: str) -> None:
    store = RedisStore(StoreConfig(url=url))
    await store.create("a", spec=b"", prompt_ids=IDS)
    steps = 0
    while True:
        call = asyncio.create_task(store.prompt_ids("a"))
        for _ in range(steps):
            await asyncio.sleep(0)
        if call.done():
            break
        call.cancel()
        assert await asyncio.gather(call, return_exceptions=True) and call.cancelled(), steps
        steps += 1
    assert steps > 3 and (await call).tolist() == IDS.tolist()
    await store.close()


async def test_a_restart_of_the_server_is_survived() -> None:
    with tempfile.TemporaryDirectory(prefix="millrace-") as directory:
        server = PrivateRedis()
        store = RedisStore(StoreConfig(url=await server.start(Path(directory))))
        await store.create("a", spec=b"", prompt_ids=IDS)
        await server.stop()
        with pytest.raises(StoreError, match=f"request store unix://.*{directory}"):
            await store.ping()
        with pytest.raises(StoreError):
            await store.append_tokens([tokens("a")])
        await server.start(Path(directory))
        assert await store.get("a") is None
        await store.create("a", spec=b"", prompt_ids=IDS)
        await store.close()
        await server.stop()


async def test_errors_name_the_url_and_never_the_password() -> None:
    store = RedisStore(StoreConfig(url="redis://someone:hunter2@127.0.0.1:1/0"))
    for call in (
        store.ping(),
        store.get("a"),
        store.create("a", spec=b"", prompt_ids=IDS),
        store.append_tokens([tokens("a")]),
        store.set_states([StateUpdate(request_id="a", state="decoding")]),
        store.prompt_ids("a"),
        store.journal("a", 0),
        store.finish({"a": "finished"}),
        store.delete("a"),
    ):
        with pytest.raises(StoreError, match=r"^request store redis://127\.0\.0\.1:1/0: ") as info:
            await call
        assert "hunter2" not in str(info.value)
    await store.close()


async def test_a_wrong_password_is_an_error_that_keeps_it_secret(url: str) -> None:
    store = RedisStore(StoreConfig(url=url.replace("unix://", "unix://someone:hunter2@")))
    with pytest.raises(StoreError, match="request store unix:///") as info:
        await store.ping()
    assert "hunter2" not in str(info.value)
    await store.close()


async def test_a_server_out_of_memory_is_an_error(url: str) -> None:
    store = RedisStore(StoreConfig(url=url))
    async with Redis.from_url(url) as client:
        await client.config_set("maxmemory", "1")
        with pytest.raises(StoreError, match="OOM"):
            await store.create("a", spec=b"", prompt_ids=IDS)
    await store.close()


async def test_a_server_that_stopped_answering_is_an_error(tmp_path: Path) -> None:
    async def swallow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_unix_server(swallow, tmp_path / "mute.sock")
    store = RedisStore(StoreConfig(url=f"unix://{tmp_path}/mute.sock", timeout_s=0.2))
    async with asyncio.timeout(HANG_S):
        with pytest.raises(StoreError, match=r"mute\.sock: no answer within 0\.2 s"):
            await store.append_tokens([tokens("a")])
    await store.close()
    server.close()


async def test_a_server_that_is_silent_for_a_while_is_asked_again(url: str) -> None:
    """Also for the calls that wait behind the silent ones, and after many of them."""
    patient, store = (
        RedisStore(StoreConfig(url=url)),
        RedisStore(StoreConfig(url=url, timeout_s=0.3)),
    )
    await patient.create("a", spec=b"", prompt_ids=IDS)
    async with Redis.from_url(url) as client:
        pid = (await client.info("server"))["process_id"]
        os.kill(pid, signal.SIGSTOP)
        try:
            calls = [store.create(f"b{i}", spec=b"", prompt_ids=IDS) for i in range(100)]
            found = await asyncio.gather(store.get("a"), *calls, return_exceptions=True)
        finally:
            os.kill(pid, signal.SIGCONT)
        assert all(isinstance(one, StoreError) for one in found)

    async def answers() -> bool:
        with contextlib.suppress(StoreError):
            return await store.get("a") is not None
        return False

    await eventually(answers)
    await store.close()
    await patient.close()


async def test_silent_connections_to_a_server_that_answers_cost_one_time_out() -> None:
    """All of them at once: the second attempt is made on a new connection."""
    async with redis_server(PRIMARY), relay(HOST, PRIMARY) as way:
        store = RedisStore(StoreConfig(url=f"redis://127.0.0.1:{way.port}", timeout_s=1.5))
        await store.create("a", spec=b"", prompt_ids=IDS)
        await asyncio.gather(*(store.prompt_ids("a") for _ in range(20)))
        way.strand()
        for _ in range(3):
            assert (await store.prompt_ids("a")).tolist() == IDS.tolist()
        way.strand()
        await store.append_tokens([tokens("a")])
        assert (await store.journal("a", 0)).tolist() == [1, 2]
        large = np.arange(LARGE_BYTES, dtype=np.int32)  # each travels alone, and is sent once
        await asyncio.gather(*(store.create(f"b{i}", spec=b"", prompt_ids=large) for i in range(5)))
        await store.close()


@pytest.mark.parametrize(
    "bad", ["redis://host:port/0", "redis://host:99999", "redis://host/0?socket_timeout=soon"]
)
def test_urls_that_make_no_sense(bad: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.url is 'redis://host"):
        RedisStore(StoreConfig(url=bad))


def test_shown_urls_hold_no_secret() -> None:
    assert shown_url("redis://u:p%40x@[::1]:6379/0?password=p") == "redis://[::1]:6379/0"
    assert shown_url("unix://u:p@/run/r.sock?password=p") == "unix:///run/r.sock"
    assert shown_url("u:p@host:6379") == "host:6379"
