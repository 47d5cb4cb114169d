"""One connection to Redis, and the rules of its calls: time-outs, attempts and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as RedisConnectionError

from millrace.core.config import StoreConfig
from millrace.core.errors import ConfigError
from millrace.state.redis.scripts import ScriptCall, ScriptRunner
from millrace.state.store import StoreError

T = TypeVar("T")

MAX_CONNECTIONS = 64
CONNECT_TIMEOUT_S = 5.0
ANSWER_TIMEOUT_S = 10.0
RETRY_DELAYS_S = (0.05, 0.25)  # attempts of idempotent calls


def shown_url(url: str) -> str:
    """Returns `url` without user, password and query, for messages and logs."""
    if "://" not in url:
        return url.rpartition("@")[2]
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"


def as_bytes(answer: bytes | str | None) -> bytes:
    """Returns the client's answer as bytes: it returns no `str` (`decode_responses` is off)."""
    return answer if isinstance(answer, bytes) else b""


class RedisLink:
    """redis-py's asyncio client with a bounded pool of connections, and its scripts."""

    def __init__(self, config: StoreConfig) -> None:
        """Connects at the first call. Raises ConfigError when `config.url` is not valid."""
        self._shown_url = shown_url(config.url)
        tcp = {} if config.url.startswith("unix:") else {"socket_keepalive": True}
        try:
            pool = BlockingConnectionPool.from_url(
                config.url,
                max_connections=MAX_CONNECTIONS,
                timeout=ANSWER_TIMEOUT_S,
                socket_connect_timeout=CONNECT_TIMEOUT_S,
                socket_timeout=ANSWER_TIMEOUT_S,
                # This class decides which calls are retried, not the library.
                retry=Retry(NoBackoff(), 0),
                protocol=2,
                driver_info=None,
                **tcp,
            )
        except ValueError as error:
            raise ConfigError(
                f"store.url is {self._shown_url!r}; it must be a redis://, rediss:// or unix:// "
                f"URL: {error}"
            ) from error
        self.client: Redis = Redis.from_pool(pool)
        self.scripts = ScriptRunner(self.client)

    async def close(self) -> None:
        await self.scripts.close()
        await self.client.aclose()

    async def run(self, call: ScriptCall) -> Any:  # noqa: ANN401 - a number, or a list of numbers
        """Runs an idempotent script and returns its answer."""
        (answer,) = await self.again(lambda: self.scripts.run([call]))
        return answer

    async def run_once(self, call: ScriptCall) -> Any:  # noqa: ANN401 - as `run`
        """Runs a script that must not run twice and returns its answer."""
        (answer,) = await self.once(lambda: self.scripts.run([call]))
        return answer

    async def now_ms(self) -> int:
        """Returns the server's clock."""
        seconds, microseconds = await self.again(lambda: self.client.time())
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def again(self, call: Callable[[], Awaitable[T]]) -> T:
        """Makes an idempotent call; tries again when the connection was lost."""
        for delay_s in RETRY_DELAYS_S:
            try:
                return await _cancellable(call())
            except AuthenticationError:  # a kind of RedisConnectionError that stays
                break
            except (RedisConnectionError, OSError):
                await asyncio.sleep(delay_s)
            except RedisError:
                break
        return await self.once(call)

    async def once(self, call: Callable[[], Awaitable[T]]) -> T:
        """Makes a call that must not be made twice. Raises StoreError when it fails."""
        try:
            return await _cancellable(call())
        except (RedisError, OSError) as error:
            raise StoreError(f"request store {self._shown_url}: {error}") from error


async def _cancellable(work: Awaitable[T]) -> T:
    """Awaits `work`. Raises CancelledError for a cancellation that `work` swallowed.

    The client sends through `asyncio.wait_for`. Before Python 3.12 that function returns its result
    when the task is cancelled in the moment of the result: the task would run on, and whatever it
    waits for next would never be interrupted.
    """
    task = asyncio.current_task()
    assert task is not None  # a coroutine runs in a task
    before = task.cancelling()
    result = await work
    if task.cancelling() > before:
        raise asyncio.CancelledError
    return result
