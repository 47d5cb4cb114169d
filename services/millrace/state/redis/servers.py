"""Makes calls at the server of their keys, with a limit for each attempt, and tries again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from redis.asyncio import Redis
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from millrace.concurrency import Patience
from millrace.state.redis.pools import close_idle
from millrace.state.redis.scripts import ScriptRunner

T = TypeVar("T")
Item = TypeVar("Item")

RETRY_DELAYS_S = (0.05, 0.25)  # attempts of idempotent calls


class Server:
    """One server's connections and scripts."""

    def __init__(
        self, name: str, client: Redis, limit_s: Callable[[int], float], *, asking: bool = False
    ) -> None:
        """Connects at the first call. `name`: for messages. The rest: of a ScriptRunner."""
        self.name = name
        self.client = client
        self.scripts = ScriptRunner(client, limit_s, asking=asking)

    async def close(self) -> None:
        await self.scripts.close()
        await self.client.aclose()

    async def attempt(self, call: Call[T], limit_s: float) -> T:
        """Makes a call once, within `limit_s`.

        Raises RedisConnectionError if the server has become a replica since it was reached, and
        if the connection has ended since it was taken: uvloop has an error of its own for that.

        Raises RedisTimeoutError for a silent server. Perhaps only its connections are lost: the
        next call opens another one.
        """
        try:
            async with Patience(limit_s):
                return await _cancellable(call(self))
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


#: What is done at a server.
Call = Callable[[Server], Awaitable[T]]
#: What is done at a server with some of the items.
PartCall = Callable[[Server, Sequence[Item]], Awaitable[Sequence[T]]]


class Servers(Protocol):
    """The servers of a store. Every call has `limit_s` for each attempt, and raises RedisError or
    OSError.
    """

    async def once(self, key: bytes, call: Call[T], limit_s: float) -> T:
        """Makes a call that must not be made twice, at the server that has `key`."""

    async def again(self, key: bytes, call: Call[T], limit_s: float) -> T:
        """Makes an idempotent call, as `again` below, at the server that has `key`."""

    async def share(
        self,
        items: Sequence[Item],
        key_of: Callable[[Item], bytes],
        call: PartCall[Item, T],
        limit_s: float,
    ) -> Sequence[T]:
        """Makes an idempotent call at each server that has keys of the items, with these items.
        Returns the answers in the order of the items.
        """

    def for_scripts(self, keys: Sequence[bytes]) -> Sequence[Sequence[bytes]]:
        """Returns the keys in parts, of each of which one script may have all."""

    async def each(self, call: Call[T], limit_s: float) -> dict[str, T]:
        """Makes an idempotent call at every server that takes writes; by the server's name."""

    async def close(self) -> None:
        """Closes all connections."""


class OneServer:
    """Servers, of which there is one."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def once(self, key: bytes, call: Call[T], limit_s: float) -> T:
        return await self._server.attempt(call, limit_s)

    async def again(self, key: bytes, call: Call[T], limit_s: float) -> T:
        return await again(lambda: self._server.attempt(call, limit_s))

    async def share(
        self,
        items: Sequence[Item],
        key_of: Callable[[Item], bytes],
        call: PartCall[Item, T],
        limit_s: float,
    ) -> Sequence[T]:
        return await again(lambda: self._server.attempt(lambda one: call(one, items), limit_s))

    def for_scripts(self, keys: Sequence[bytes]) -> Sequence[Sequence[bytes]]:
        return [keys]

    async def each(self, call: Call[T], limit_s: float) -> dict[str, T]:
        return {self._server.name: await again(lambda: self._server.attempt(call, limit_s))}

    async def close(self) -> None:
        await self._server.close()


async def again(attempt: Callable[[], Awaitable[T]]) -> T:
    """Makes an idempotent attempt; makes it again when the connection was lost, and once when the
    server was silent or refused.
    """
    for delay_s in RETRY_DELAYS_S:
        try:
            return await attempt()
        except AuthenticationError:  # a kind of RedisConnectionError that stays
            break
        except (RedisConnectionError, OSError):
            await asyncio.sleep(delay_s)
        except RedisError:
            break
    return await attempt()


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
