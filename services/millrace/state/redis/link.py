"""The connections to Redis, and the rules of their calls: time-outs, attempts and errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from millrace.concurrency import patience
from millrace.core.config import StoreConfig
from millrace.core.errors import ConfigError
from millrace.state.redis.pools import URLS, close_idle, pool_of, shown_url
from millrace.state.redis.scripts import ScriptCall, ScriptRunner, bytes_of
from millrace.state.store import StoreError

T = TypeVar("T")

MAX_CONNECTIONS = 64
#: Of the library, for what no call waits for any more.
SOCKET_TIMEOUT_S = 10.0
#: For answers of unknown size that may be large.
LARGE_ANSWER_S = 10.0
#: What a call sends and gets may take this much longer.
SLOWEST_BYTES_S = 1 << 20
RETRY_DELAYS_S = (0.05, 0.25)  # attempts of idempotent calls


def as_bytes(answer: bytes | str | None) -> bytes:
    """Returns the client's answer as bytes: it returns no `str` (`decode_responses` is off)."""
    return answer if isinstance(answer, bytes) else b""


class RedisLink:
    """redis-py's asyncio client with a bounded pool of connections, and its scripts."""

    def __init__(self, config: StoreConfig) -> None:
        """Connects at the first call. Raises ConfigError when `config.url` is not valid."""
        self._shown_url = shown_url(config.url)
        self._timeout_s = config.timeout_s
        options = {
            "max_connections": MAX_CONNECTIONS,
            "timeout": SOCKET_TIMEOUT_S,
            "socket_connect_timeout": SOCKET_TIMEOUT_S,
            "socket_timeout": SOCKET_TIMEOUT_S,
            # This class decides which calls are retried, not the library.
            "retry": Retry(NoBackoff(), 0),
            "protocol": 2,
            "driver_info": None,
        }
        try:
            pool = pool_of(config.url, options)
        except ValueError as error:
            raise ConfigError(
                f"store.url is {self._shown_url!r}; it must be a {URLS}: {error}"
            ) from error
        self.client: Redis = Redis.from_pool(pool)
        self.scripts = ScriptRunner(self.client, self.limit_s)

    async def close(self) -> None:
        await self.scripts.close()
        await self.client.aclose()

    def limit_s(self, size_bytes: int = 0) -> float:
        """Returns how long the server may take for a call of this size, while this process runs."""
        return self._timeout_s + size_bytes / SLOWEST_BYTES_S

    async def run(self, call: ScriptCall) -> Any:  # noqa: ANN401 - a number, or a list of numbers
        """Runs an idempotent script and returns its answer."""
        (answer,) = await self.run_all([call])
        return answer

    async def run_all(self, calls: Sequence[ScriptCall]) -> list[Any]:
        """Runs idempotent scripts and returns their answers."""
        limit_s = self.limit_s(bytes_of(calls))
        return await self.again(lambda: self.scripts.run(calls), limit_s)

    async def run_once(self, call: ScriptCall) -> Any:  # noqa: ANN401 - as `run`
        """Runs a script that must not run twice and returns its answer."""
        limit_s = self.limit_s(bytes_of([call]))
        (answer,) = await self.once(lambda: self.scripts.run([call]), limit_s)
        return answer

    async def now_ms(self) -> int:
        """Returns the server's clock."""
        seconds, microseconds = await self.again(lambda: self.client.time())
        return int(seconds) * 1000 + int(microseconds) // 1000

    async def again(self, call: Callable[[], Awaitable[T]], limit_s: float | None = None) -> T:
        """Makes an idempotent call; tries again when the connection was lost, and once when the
        server was silent for `limit_s`. None: for as long as an answer takes.
        """
        for delay_s in RETRY_DELAYS_S:
            try:
                return await self._attempt(call, limit_s)
            except AuthenticationError:  # a kind of RedisConnectionError that stays
                break
            except (RedisConnectionError, OSError):
                await asyncio.sleep(delay_s)
            except RedisError:
                break
        return await self.once(call, limit_s)

    async def once(self, call: Callable[[], Awaitable[T]], limit_s: float | None = None) -> T:
        """Makes a call that must not be made twice. Raises StoreError when it fails."""
        try:
            return await self._attempt(call, limit_s)
        except (RedisError, OSError) as error:
            raise StoreError(f"request store {self._shown_url}: {error}") from error

    async def _attempt(self, call: Callable[[], Awaitable[T]], limit_s: float | None) -> T:
        """Raises RedisConnectionError if the server has become a replica since it was reached, and
        if the connection has ended since it was taken: uvloop has an error of its own for that.

        Raises RedisTimeoutError for a silent server. Perhaps only its connections are lost: the
        next call opens another one.
        """
        limit_s = self.limit_s() if limit_s is None else limit_s
        try:
            async with patience(limit_s):
                return await _cancellable(call())
        except TimeoutError as error:
            await close_idle(self.client.connection_pool)
            raise RedisTimeoutError(f"no answer within {limit_s:.3g} s") from error
        except RuntimeError as error:
            if "the handler is closed" not in str(error):
                raise
            raise RedisConnectionError(f"the connection has ended: {error}") from error
        except ResponseError as error:
            if "READONLY" not in str(error):  # within the message where a script wrote
                raise
            pool = self.client.connection_pool
            await pool.update_active_connections_for_reconnect()
            await pool.disconnect(inuse_connections=False)
            raise RedisConnectionError(f"it has become a replica: {error}") from error


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
