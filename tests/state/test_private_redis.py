"""PrivateRedis: private, quiet, and ended with its parent."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random

import psutil
import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from millrace.local import private_redis
from millrace.local.private_redis import PrivateRedis, find_redis_server
from millrace.state.store import StoreError
from support.deadlines import HANG_S
from support.live_stack import eventually
from support.small_disk import filled, small_disk

PARENT = """
import asyncio, sys
from pathlib import Path
from millrace.local.private_redis import PrivateRedis

async def main():
    server = PrivateRedis()
    print(await server.start(Path(sys.argv[1])), server.pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""

MORE = Random(0).randbytes(1 << 16)  # Redis can't compress it, and a full disk has no room for it


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Returns a folder whose sockets have short paths, for any TMPDIR."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


async def settings(url: str, *names: str) -> dict[str, str]:
    async with Redis.from_url(url, decode_responses=True) as client:
        return {name: (await client.config_get(name))[name] for name in names}


async def test_it_is_ours_alone_and_leaves_nothing(short_path: Path) -> None:
    directory = short_path / "with space % and é"
    server = PrivateRedis()
    url = await server.start(directory)
    try:
        socket = directory / "redis.sock"
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        assert stat.S_IMODE(socket.stat().st_mode) == 0o700
        assert await settings(url, "port", "save", "appendonly") == {
            "port": "0",
            "save": "",
            "appendonly": "yes",
        }
        assert server.pid is not None
        assert psutil.Process(server.pid).net_connections("inet") == []
        assert os.getsid(server.pid) != os.getsid(0)
        with pytest.raises(StoreError, match=f"process {server.pid}"):
            await server.start(directory)
    finally:
        await server.stop()
    assert sorted(p.name for p in directory.iterdir()) == ["redis.log"]


async def test_stop_ends_that_process_and_start_works_again(short_path: Path) -> None:
    server = PrivateRedis()
    await server.stop()
    for _ in range(2):
        url = await server.start(short_path)
        pid = server.pid
        assert pid is not None
        async with Redis.from_url(url) as client:
            assert await client.get("left over") is None
            await client.set("left over", "1")
        await server.stop()
        assert server.pid is None and not psutil.pid_exists(pid)


async def ends(server: PrivateRedis) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    async with asyncio.timeout(HANG_S):
        await server.ended()


async def test_a_server_that_is_killed_has_its_data_again(short_path: Path) -> None:
    server = PrivateRedis()
    url = await server.start(short_path)
    try:
        async with Redis.from_url(url) as client:
            for number in range(1000):
                await client.rpush("numbers", number)
            await ends(server)
            assert await server.start(short_path) == url
            assert await client.llen("numbers") == 1000

            assert server.data is not None
            await ends(server)
            shutil.rmtree(server.data)
            await server.start(short_path)
            assert await client.llen("numbers") == 0
    finally:
        await server.stop()


async def test_a_full_disk_costs_the_data_alone(short_path: Path, caplog) -> None:
    with small_disk(short_path / "disk") as disk:
        server = PrivateRedis()
        url = await server.start(disk)
        ended = asyncio.create_task(server.ended())
        async with Redis.from_url(url) as client:

            async def is_written() -> bool:
                with suppress(RedisError):
                    return await client.set("more", MORE)
                return False

            async def is_saved() -> bool:
                if (await client.info("persistence"))["aof_rewrite_in_progress"]:
                    return False
                files = [path for path in server.data.rglob("*") if path.is_file()]
                return sum(path.stat().st_size for path in files) > len(MORE)

            assert server.data is not None
            await client.set("before", "1")
            with filled(disk) as fill:
                await is_written()
                await eventually(lambda: bool(caplog.records))
                await eventually(is_written)
                fill()
                assert await is_written()
                assert [one.getMessage() for one in caplog.records] == [
                    "the private Redis can't write to its disk; it goes on in memory"
                ]
            await eventually(is_saved)
            await client.set("after", "2")
            os.kill(server.pid, signal.SIGKILL)
            async with asyncio.timeout(HANG_S):
                await ended
            await server.start(disk)
            assert await client.mget("before", "after") == [b"1", b"2"]
        await server.stop()


async def test_stop_does_not_wait_for_ever(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(private_redis, "STOP_TIMEOUT_S", 0.2)
    server = PrivateRedis()
    await server.start(short_path)
    assert server.pid is not None
    process = psutil.Process(server.pid)
    process.suspend()
    await server.stop()
    assert not process.is_running()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_it_dies_with_its_parent(short_path: Path, how: signal.Signals) -> None:
    parent = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", PARENT, str(short_path)), stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    _, pid = (await parent.stdout.readline()).split()
    assert psutil.Process(int(pid)).name() == "redis-server"
    child, ended = os.pidfd_open(int(pid)), asyncio.Event()  # readable once the process ended
    asyncio.get_running_loop().add_reader(child, ended.set)
    parent.send_signal(how)
    await parent.wait()
    try:
        async with asyncio.timeout(HANG_S):
            await ended.wait()
    finally:
        asyncio.get_running_loop().remove_reader(child)
        os.close(child)


async def test_a_server_that_ends_at_once_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "redis-server"
    broken.write_text("#!/bin/sh\necho 'no memory today' >&2\nexit 3\n")
    broken.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    server = PrivateRedis()
    with pytest.raises(StoreError, match=r"redis-server ended at once: no memory today"):
        await server.start(tmp_path / "data")
    assert server.pid is None


async def test_a_server_that_never_answers_is_explained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mute = tmp_path / "redis-server"
    mute.write_text("#!/bin/sh\necho starting slowly > redis.log\nexec sleep 30\n")
    mute.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(private_redis, "START_TIMEOUT_S", 0.5)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "redis.log").write_text("loading modules\n")
    server = PrivateRedis()
    with pytest.raises(StoreError, match=r"(?s)does not answer within 0.5 s.*loading modules"):
        await server.start(tmp_path / "data")
    assert server.pid is None


async def test_socket_paths_have_a_limit(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="too long for a unix socket: 107 bytes at most"):
        await PrivateRedis().start(tmp_path / ("x" * 100))


async def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=str(tmp_path / "file")):
        await PrivateRedis().start(tmp_path / "file" / "below")


def test_the_server_on_path_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packaged = find_redis_server()
    assert packaged.name == "redis-server"
    own = tmp_path / "redis-server"
    own.touch(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_redis_server() == own
    own.unlink()
    assert os.access(find_redis_server(), os.X_OK) and find_redis_server() != own


def test_without_any_server_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(StoreError, match="no redis-server: install one"):
        find_redis_server()


async def test_a_start_whose_client_loses_the_cancellation_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the client of Redis does while it disconnects."""
    leaving = asyncio.Event()

    class Client(Redis):
        async def __aexit__(self, *error: object) -> None:
            await super().__aexit__(*error)
            leaving.set()
            with suppress(asyncio.CancelledError):
                await asyncio.Event().wait()

    monkeypatch.setattr(private_redis, "Redis", Client)
    redis = PrivateRedis()
    starting = asyncio.create_task(redis.start(tmp_path))
    await asyncio.wait_for(leaving.wait(), HANG_S)
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled() and redis.pid is None
    await redis.stop()
