"""Makes calls at the servers of a Redis Cluster, each of which has some of the hash slots of keys.

A map says which server has a slot. It is read when it is needed first, and again when a server has
sent a call to another one or could not be reached: after the loss of a primary the cluster promotes
its replica. A slot moves while the cluster is resharded; until it has moved, its server sends calls
of keys that it has no more to the slot's next server, one at a time (ASK).

redis-py's own client of clusters is not used: it sends ASKING and the call on different
connections, closes the connections of all servers when one has lost slots, and raises an error when
all connections of a server are in use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeVar

from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.client import Pipeline
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import (
    AskError,
    AuthenticationError,
    ClusterDownError,
    MovedError,
    RedisError,
    TryAgainError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from millrace.concurrency import Patience
from millrace.state.redis.pools import Address, NotTaken, close_idle
from millrace.state.redis.servers import Call, PartCall, Server, again

T = TypeVar("T")
Item = TypeVar("Item")

#: For a server that is asked for the map, and for its answer; the next one is asked after it.
MAP_TIMEOUT_S = 1.0
#: Before each further attempt of a call that was sent to another server, or whose slot moves.
PAUSES_S = (0.0, 0.0, 0.01, 0.02, 0.05, 0.1, 0.2, 0.4, 0.8)
UNREACHED = (RedisConnectionError, RedisTimeoutError, OSError)
#: By range of slots: the first one, the last one, and the primary and its replicas, each with host,
#: port and more.
Rows = list[list[Any]]


class SlotMoves(RedisError):
    """No server has taken the call: its slot moves for long, or the servers disagree."""


class Cluster:
    """The servers of a cluster."""

    def __init__(
        self,
        named: Iterable[Address],
        pool_of: Callable[[Address], BlockingConnectionPool],
        limit_s: Callable[[int], float],
    ) -> None:
        """Connects at the first call. `named`: some of the servers. `limit_s`: of a ScriptRunner.

        `pool_of` makes the connections to a server.
        """
        self._named = list(named)
        self._pool_of = pool_of
        self._limit_s = limit_s
        #: Those with connections.
        self.servers: dict[Address, Server] = {}
        self._map: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        self._is_doubtful = True
        self._reading = asyncio.Lock()
        self._reads = 0
        #: Who is asked for the map, the next one first.
        self._asked = list(self._named)

    async def once(self, key: bytes, call: Call[T], limit_s: float) -> T:
        """Makes a call again that was not made: its server did not take it, and another one has the
        slot now; or the server has sent it to another one.
        """
        slot = key_slot(key)
        asked: Server | None = None
        for pause_s in PAUSES_S:
            owner = await self._owner(slot, limit_s)
            try:
                return await self._attempt(owner, call, limit_s, asked)
            except NotTaken:
                if owner == await self._owner(slot, limit_s):  # the map is read again
                    raise
                asked = None
            except (AskError, TryAgainError) as error:
                asked = self._next(error, owner)
            await asyncio.sleep(pause_s)
        raise SlotMoves(f"no server of the cluster takes keys of slot {slot}, which moves")

    async def again(self, key: bytes, call: Call[T], limit_s: float) -> T:
        return await again(lambda: self.once(key, call, limit_s))

    async def share(
        self,
        items: Sequence[Item],
        key_of: Callable[[Item], bytes],
        call: PartCall[Item, T],
        limit_s: float,
    ) -> Sequence[T]:
        """A server out of reach fails its part alone: the other parts are made before the error is
        raised.
        """
        if self._is_doubtful:
            await again(lambda: self._read_map(limit_s))
        parts: dict[Address | None, list[int]] = {}
        for index, item in enumerate(items):
            parts.setdefault(self._map[key_slot(key_of(item))], []).append(index)
        if len(parts) == 1:
            return await self._part(items, key_of, call, limit_s)
        work = [
            self._part([items[index] for index in part], key_of, call, limit_s)
            for part in parts.values()
        ]
        answers: dict[int, T] = {}
        for part, found in zip(
            parts.values(), await asyncio.gather(*work, return_exceptions=True), strict=True
        ):
            if isinstance(found, BaseException):
                raise found
            answers.update(zip(part, found, strict=True))
        return [answers[index] for index in range(len(items))]

    def for_scripts(self, keys: Sequence[bytes]) -> Sequence[Sequence[bytes]]:
        """A script's keys are all of one slot."""
        parts: dict[int, list[bytes]] = {}
        for key in keys:
            parts.setdefault(key_slot(key), []).append(key)
        return list(parts.values())

    async def each(self, call: Call[T], limit_s: float) -> dict[str, T]:
        """Raises RedisConnectionError if the servers have not all slots."""
        self._is_doubtful = True  # no key would show that the map is old
        await again(lambda: self._read_map(limit_s))
        absent = self._map.count(None)
        if absent:
            raise RedisConnectionError(f"{absent} slots of the cluster have no server")
        answers: dict[str, T] = {}
        for owner in dict.fromkeys(one for one in self._map if one is not None):
            answers[self._server(owner).name] = await again(
                partial(self._attempt, owner, call, limit_s)
            )
        return answers

    async def close(self) -> None:
        for server in self.servers.values():
            await server.close()

    async def _part(
        self,
        items: Sequence[Item],
        key_of: Callable[[Item], bytes],
        call: PartCall[Item, T],
        limit_s: float,
    ) -> Sequence[T]:
        """Makes the call for items whose keys one server has."""

        async def alone(item: Item) -> T:
            (answer,) = await self.once(key_of(item), lambda one: call(one, [item]), limit_s)
            return answer

        async def attempt() -> Sequence[T]:
            owner = await self._owner(key_slot(key_of(items[0])), limit_s)
            try:
                return await self._attempt(owner, lambda one: call(one, items), limit_s)
            except (AskError, TryAgainError):  # some slot moves, or has moved
                return [await alone(item) for item in items]  # in order: keys may be the same

        return await again(attempt)

    async def _attempt(
        self, owner: Address, call: Call[T], limit_s: float, asked: Server | None = None
    ) -> T:
        """Makes the call at `asked`, else at `owner`. Doubts the map if the answer is a reason."""
        server = asked or self._server(owner)
        try:
            return await server.attempt(call, limit_s)
        except MovedError:
            self._is_doubtful = True
            self.ask_first(owner)  # it knows a newer map
            raise
        except ClusterDownError as error:
            self._is_doubtful = True
            raise NotTaken(f"{server.name}: {error}") from error
        except UNREACHED:
            self._is_doubtful = True
            raise

    def _next(self, error: AskError | TryAgainError, owner: Address) -> Server | None:
        """Returns the server that `owner` names for the next attempt; None: its own owner."""
        if isinstance(error, MovedError | TryAgainError):
            return None
        server = self._server((error.host or owner[0], error.port))
        client = _Asking(connection_pool=server.client.connection_pool)
        return Server(server.name, client, self._limit_s, asking=True)

    async def _owner(self, slot: int, limit_s: float) -> Address:
        if self._is_doubtful:
            await self._read_map(limit_s)
        owner = self._map[slot]
        if owner is None:
            self._is_doubtful = True
            raise RedisConnectionError(f"slot {slot} of the cluster has no server")
        return owner

    def _server(self, address: Address) -> Server:
        if address not in self.servers:
            host, port = address
            name = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            client = Redis.from_pool(self._pool_of(address))
            self.servers[address] = Server(name, client, self._limit_s)
        return self.servers[address]

    async def _read_map(self, limit_s: float) -> None:
        """Reads the map, unless another call has read it meanwhile."""
        reads = self._reads
        try:
            async with Patience(limit_s), self._reading:
                if reads == self._reads:
                    self._take(*await self._newest())
                    await self._leave_servers()
        except TimeoutError as error:
            raise RedisTimeoutError("no server of the cluster has named the slots") from error

    async def _newest(self) -> tuple[Rows, Address]:
        """Returns the first map that has all slots, else the fullest one; and who gave it.

        Who was asked is asked last the next time: it may be cut off from the others.
        """
        found: list[tuple[int, Rows, Address]] = []
        last: Exception | None = None
        for address in list(self._asked):
            self._asked.append(self._asked.pop(self._asked.index(address)))
            try:
                rows = await self._server(address).attempt(read_slots, MAP_TIMEOUT_S)
            except (RedisError, OSError) as error:
                last = error
                continue
            covered = sum(end - start + 1 for start, end, *_ in rows)
            found.append((covered, rows, address))
            if covered == REDIS_CLUSTER_HASH_SLOTS:
                break
        if found:
            _, rows, address = max(found, key=lambda one: one[0])
            return rows, address
        assert last is not None  # somebody was asked
        if isinstance(last, AuthenticationError) or not isinstance(last, UNREACHED):
            raise last
        raise RedisConnectionError(f"no server of the cluster answers: {last}") from last

    def _take(self, rows: Rows, source: Address) -> None:
        slots: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
        known = dict.fromkeys(self._named)
        for first, last, *servers in rows:
            addresses = [_address(host, port, source) for host, port, *_ in servers]
            slots[first : last + 1] = [addresses[0]] * (last + 1 - first)
            known |= dict.fromkeys(addresses)
        self._map = slots
        self._is_doubtful = False
        self._reads += 1
        new = [one for one in known if one not in self._asked]
        self._asked = new + [one for one in self._asked if one in known]

    def ask_first(self, address: Address) -> None:
        """Asks this server for the map before the others."""
        self._asked = [address, *(one for one in self._asked if one != address)]

    async def _leave_servers(self) -> None:
        """Forgets servers that the cluster has no more, once no call uses them."""
        for address in self.servers.keys() - set(self._asked):
            if await close_idle(self.servers[address].client.connection_pool):
                del self.servers[address]


class _Asking(Redis):
    """A client whose every command follows an ASKING, on the same connection."""

    def pipeline(self, transaction: bool = True, shard_hint: str | None = None) -> Pipeline:
        return _AskingPipeline(
            self.connection_pool, self.response_callbacks, transaction, shard_hint
        )

    async def execute_command(self, *args: Any, **options: Any) -> Any:  # noqa: ANN401 - of redis-py
        async with self.pipeline(transaction=False) as pipe:
            pipe.execute_command(*args, **options)
            (answer,) = await pipe.execute(raise_on_error=False)
        if isinstance(answer, Exception):
            raise answer
        return answer


class _AskingPipeline(Pipeline):
    async def execute(self, raise_on_error: bool = True) -> list[Any]:
        self.command_stack = [
            command for own in self.command_stack for command in ((("ASKING",), {}), own)
        ]
        return (await super().execute(raise_on_error))[1::2]


async def read_slots(server: Server) -> Rows:
    rows: Rows = await server.client.execute_command("CLUSTER", "SLOTS")
    return rows


def _address(host: bytes | None, port: int, source: Address) -> Address:
    """Returns a server's address. Without a host it is that of `source`, who names it."""
    return (source[0] if host in (None, b"", b"?") else host.decode()), port
