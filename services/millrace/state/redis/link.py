"""The calls of the stores to Redis: their limits of time, and one kind of error."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.client import Pipeline
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from millrace.core.config import StoreConfig
from millrace.core.errors import ConfigError
from millrace.state.redis.cluster import Cluster
from millrace.state.redis.pools import URLS, cluster_of, is_cluster, pool_of, shown_url
from millrace.state.redis.scripts import ScriptCall, bytes_of
from millrace.state.redis.servers import OneServer, Server, Servers
from millrace.state.store import StoreError

T = TypeVar("T")

MAX_CONNECTIONS = 64
#: Of the library, for what no call waits for any more.
SOCKET_TIMEOUT_S = 10.0
#: For answers of unknown size that may be large.
LARGE_ANSWER_S = 10.0
#: What a call sends and gets may take this much longer.
SLOWEST_BYTES_S = 1 << 20


def as_bytes(answer: bytes | str | None) -> bytes:
    """Returns the client's answer as bytes: it returns no `str` (`decode_responses` is off)."""
    return answer if isinstance(answer, bytes) else b""


class RedisLink:
    """The servers of a store. Every call raises StoreError when it fails.

    A call names a key, or a script's first key, which decides the server: in a cluster each server
    has a part of the keys. `limit_s` of None: for as long as an answer takes.
    """

    def __init__(self, config: StoreConfig) -> None:
        """Connects at the first call. Raises ConfigError when `config.url` is not valid."""
        self._shown_url = shown_url(config.url)
        self._timeout_s = config.timeout_s
        options = {
            "max_connections": MAX_CONNECTIONS,
            "timeout": SOCKET_TIMEOUT_S,
            "socket_connect_timeout": SOCKET_TIMEOUT_S,
            "socket_timeout": SOCKET_TIMEOUT_S,
            # The servers decide which calls are retried, not the library.
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "driver_info": None,
        }
        try:
            self._servers = self._servers_of(config.url, options)
        except ValueError as error:
            raise ConfigError(
                f"store.url is {self._shown_url!r}; it must be a {URLS}: {error}"
            ) from error

    def _servers_of(self, url: str, options: dict[str, Any]) -> Servers:
        if is_cluster(url):
            return Cluster(*cluster_of(url, options), self.limit_s)
        client = Redis.from_pool(pool_of(url, options))
        return OneServer(Server(self._shown_url, client, self.limit_s))

    async def close(self) -> None:
        await self._servers.close()

    def limit_s(self, size_bytes: int = 0) -> float:
        """Returns how long the server may take for a call of this size, while this process runs."""
        return self._timeout_s + size_bytes / SLOWEST_BYTES_S

    async def run(self, call: ScriptCall) -> Any:  # noqa: ANN401 - a number, or a list of numbers
        """Runs an idempotent script and returns its answer."""
        (answer,) = await self.run_all([call])
        return answer

    async def run_all(self, calls: Sequence[ScriptCall]) -> Sequence[Any]:
        """Runs idempotent scripts and returns their answers."""
        limit_s = self.limit_s(bytes_of(calls))
        return await self._told(self._servers.share(calls, _first_key, _run, limit_s))

    def for_scripts(self, keys: Sequence[bytes]) -> Sequence[Sequence[bytes]]:
        """Returns the keys in parts, of each of which one script may have all."""
        return self._servers.for_scripts(keys)

    async def run_once(self, call: ScriptCall) -> Any:  # noqa: ANN401 - as `run`
        """Runs a script that must not run twice and returns its answer."""
        limit_s = self.limit_s(call.size_bytes)
        work = self._servers.once(_first_key(call), lambda one: one.scripts.run([call]), limit_s)
        (answer,) = await self._told(work)
        return answer

    async def now_ms(self, key: bytes) -> int:
        """Returns the clock of the server that has `key`."""
        seconds, microseconds = await self.again(key, lambda client: client.time())
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def again(
        self, key: bytes, call: Callable[[Redis], Awaitable[T]], limit_s: float | None = None
    ) -> T:
        """Makes an idempotent call of this key; tries again when the connection was lost, and once
        when the server was silent for `limit_s`.
        """
        limit_s = self.limit_s() if limit_s is None else limit_s
        return await self._told(self._servers.again(key, lambda one: call(one.client), limit_s))

    async def once(
        self, key: bytes, call: Callable[[Redis], Awaitable[T]], limit_s: float | None = None
    ) -> T:
        """Makes a call of this key that must not be made twice."""
        limit_s = self.limit_s() if limit_s is None else limit_s
        return await self._told(self._servers.once(key, lambda one: call(one.client), limit_s))

    async def by_key(
        self,
        keys: Sequence[bytes],
        add: Callable[[Pipeline, bytes], object],
        limit_s: float | None = None,
    ) -> Sequence[Any]:
        """Makes an idempotent call of each key, which `add` puts into a pipeline, in one round trip
        to each server. Returns the answers in the order of the keys.
        """

        async def call(server: Server, part: Sequence[bytes]) -> list[Any]:
            # A pipeline forgets its commands when it fails: every attempt needs one of its own.
            async with server.client.pipeline(transaction=False) as pipe:
                for key in part:
                    add(pipe, key)
                answers: list[Any] = await pipe.execute()
            return answers

        limit_s = self.limit_s() if limit_s is None else limit_s
        return await self._told(self._servers.share(keys, lambda key: key, call, limit_s))

    async def each(
        self, call: Callable[[Redis], Awaitable[T]], limit_s: float | None = None
    ) -> dict[str, T]:
        """Makes an idempotent call at every server that takes writes; by the server's name."""
        limit_s = self.limit_s() if limit_s is None else limit_s
        return await self._told(self._servers.each(lambda one: call(one.client), limit_s))

    async def _told(self, work: Awaitable[T]) -> T:
        try:
            return await work
        except (RedisError, OSError) as error:
            raise StoreError(f"request store {self._shown_url}: {error}") from error


def _first_key(call: ScriptCall) -> bytes:
    return call.keys[0]


async def _run(server: Server, calls: Sequence[ScriptCall]) -> Sequence[Any]:
    return await server.scripts.run(calls)
