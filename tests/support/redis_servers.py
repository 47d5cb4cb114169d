"""Real redis-servers on a loopback address of their own: a primary, its replica, a Sentinel."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from redis.asyncio import Redis
from redis.exceptions import RedisError

from millrace.local.private_redis import find_redis_server
from millrace.local.processes.child import ending_with_this
from support.deadlines import HANG_S

#: No other process of this machine listens there, so ports need no search.
HOST = f"127.77.{os.getpid() >> 8 & 255}.{os.getpid() & 255}"
PRIMARY, REPLICA, SENTINEL = 6379, 6380, 26379
SERVICE = "millrace"
#: Longer than any stall of a busy machine: no failover begins by itself.
NEVER_MS = round(2000 * HANG_S)


async def until(check: Callable[[], Awaitable[bool]]) -> None:
    """Waits for `check` to be true; until then its server may be out of reach."""
    async with asyncio.timeout(HANG_S):
        while True:
            with contextlib.suppress(RedisError, OSError):
                if await check():
                    return
            await asyncio.sleep(0.01)


@asynccontextmanager
async def redis_server(
    port: int, *options: str, password: str = "", user: str | None = None, user_password: str = ""
) -> AsyncIterator[Redis]:
    """Yields a client of a server at `port`; the server ends with the block, if it has not yet.

    `user`: of the client, if it is not the default one.
    """
    with tempfile.TemporaryDirectory(prefix="millrace-") as folder:
        file = Path(folder) / "redis.conf"
        lines = [f"bind {HOST}", f"port {port}", f"dir {folder}", *options]
        lines += [f"logfile {folder}/log"] + ([f"requirepass {password}"] if password else [])
        file.write_text("\n".join(lines) + "\n")
        command = [str(find_redis_server()), str(file)]
        if port == SENTINEL:
            command.append("--sentinel")
        process = await asyncio.create_subprocess_exec(*ending_with_this(command, signal.SIGKILL))
        given = user_password or password or None
        client = Redis(host=HOST, port=port, username=user, password=given, protocol=2)
        try:
            async with client:
                await until(client.ping)
                yield client
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()


class Watched:
    """A primary and its replica, which a Sentinel watches. Clients of each."""

    def __init__(self, primary: Redis, replica: Redis, sentinel: Redis, url: str) -> None:
        self.primary = primary
        self.replica = replica
        self.sentinel = sentinel
        self.url = url

    async def replicated(self) -> None:
        """Returns when the replica has all that the primary has now."""
        written = (await self.primary.info("replication"))["master_repl_offset"]

        async def has_it() -> bool:
            return bool((await self.replica.info("replication"))["slave_repl_offset"] >= written)

        await until(has_it)

    async def kill_primary(self) -> None:
        """Kills the primary; the Sentinel notices it after 300 ms and promotes the replica."""
        pid = (await self.primary.info("server"))["process_id"]
        await self.sentinel.sentinel_set(SERVICE, "down-after-milliseconds", 300)
        os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def watched(password: str = "", of_sentinel: str = "") -> AsyncIterator[Watched]:
    """Yields the servers when the Sentinel could promote the replica."""
    follows = f"replicaof {HOST} {PRIMARY}", f"replica-announce-ip {HOST}"
    auth = [f"masterauth {password}"] if password else []
    async with AsyncExitStack() as stack:
        start = stack.enter_async_context
        primary = await start(redis_server(PRIMARY, *auth, password=password))
        await primary.config_set("repl-diskless-sync-delay", 0)
        replica = await start(redis_server(REPLICA, *follows, *auth, password=password))

        async def follows_it() -> bool:
            return bool((await replica.info("replication"))["master_link_status"] == "up")

        await until(follows_it)
        watch = [
            f"sentinel monitor {SERVICE} {HOST} {PRIMARY} 1",
            f"sentinel down-after-milliseconds {SERVICE} {NEVER_MS}",
            f"sentinel failover-timeout {SERVICE} 1000",
        ]
        watch += [f"sentinel auth-pass {SERVICE} {password}"] if password else []
        sentinel = await start(redis_server(SENTINEL, *watch, password=of_sentinel))

        async def could_promote() -> bool:
            found = await sentinel.sentinel_slaves(SERVICE)
            return bool(
                found and found[0]["flags"] == "slave" and found[0]["master-link-status"] == "ok"
            )

        await until(could_promote)
        user = f":{password}@" if password else ""
        query = f"?sentinel_password={of_sentinel}" if of_sentinel else ""
        absent = SENTINEL + 1
        url = f"redis+sentinel://{user}{HOST}:{absent},{HOST}:{SENTINEL}/{SERVICE}/0{query}"
        yield Watched(primary, replica, sentinel, url)
