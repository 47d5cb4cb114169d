"""Makes the pools of connections for a URL: to one server, to the primary that Sentinels name, or
to the servers of a cluster.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Connection, ConnectionPool
from redis.asyncio.connection import AbstractConnection, parse_url
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.exceptions import AuthenticationError, RedisError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

#: The kinds of URLs, for messages.
URLS = (
    "redis://, rediss://, unix://, redis+sentinel://, rediss+sentinel://, redis+cluster:// or "
    "rediss+cluster:// URL"
)
SCHEMES = (
    *("redis", "rediss", "unix"),
    *("redis+sentinel", "rediss+sentinel", "redis+cluster", "rediss+cluster"),
)
PORT, SENTINEL_PORT = 6379, 26379
#: For a connection to a Sentinel, and for its answer; the next one is asked after it.
SENTINEL_TIMEOUT_S = 1.0

_MODES = {
    b"standalone": "this server is of no Redis Cluster: name it in a redis:// URL",
    b"cluster": "this is a server of a Redis Cluster: name it in a redis+cluster:// URL",
    b"sentinel": "this is a Sentinel: name it in a redis+sentinel:// URL, with its service",
}

#: A server's host and port.
Address = tuple[str, int]


class NotTaken(RedisConnectionError):
    """A server of a cluster has not got the call, or takes none."""


class WrongServer(RedisError):
    """A server of a kind that can't hold the store. No second attempt helps."""


def shown_url(url: str) -> str:
    """Returns `url` without user, password and query, for messages and logs."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url.rpartition("@")[2]
    authority, slash, path = rest.partition("?")[0].partition("/")
    return f"{scheme}://{authority.rpartition('@')[2]}{slash}{path}"


def pool_of(url: str, options: Mapping[str, Any]) -> BlockingConnectionPool:
    """Returns a pool that connects at the first call. `options`: of the pool and its connections.

    Raises ValueError if the URL or an option in it makes no sense.
    """
    options = {**options, "redis_connect_func": _begin}
    if not url.startswith("unix:"):
        options["socket_keepalive"] = True
    if url.partition("://")[0].endswith("+sentinel"):
        return _checked(_sentinel_pool(url, options))
    return _checked(BlockingConnectionPool.from_url(url, **options))


def is_cluster(url: str) -> bool:
    """Returns whether the URL names servers of a cluster."""
    return url.partition("://")[0].endswith("+cluster")


def cluster_of(
    url: str, options: Mapping[str, Any]
) -> tuple[list[Address], Callable[[Address], BlockingConnectionPool]]:
    """Returns the servers of a URL SCHEME+cluster://[USER:PASSWORD@]HOST[:PORT],...[/0][?OPTIONS],
    and what makes a pool for one of the cluster's servers, otherwise as `pool_of`.
    """
    hosts, path, given = _parts(url, "cluster")
    if path not in ("", "0") or given.pop("db", 0):
        raise ValueError("a cluster has the database 0 alone")
    begin = {"redis_connect_func": _begin_in_cluster, "socket_keepalive": True}

    def pool(address: Address) -> BlockingConnectionPool:
        host, port = address
        return _ClusterPool(host=host, port=port, **{**options, **begin, **given})

    named = _addresses(hosts, PORT, "server")
    _checked(pool(named[0]))
    return named, pool


def _checked(pool: BlockingConnectionPool) -> BlockingConnectionPool:
    """Raises ValueError if the pool's connections have an option that they don't know."""
    try:
        pool.make_connection()  # without connecting
    except TypeError as error:
        raise ValueError(f"an option after the question mark is unknown: {error}") from error
    return pool


async def close_idle(pool: ConnectionPool) -> bool:
    """Closes the connections that no call uses, without a word to the server; returns whether no
    call uses any.
    """
    for connection in list(pool._available_connections):
        await connection.disconnect(nowait=True)
    return not pool._in_use_connections


class _ClusterPool(BlockingConnectionPool):
    """Connects to a server of a cluster. Raises NotTaken if that fails."""

    async def ensure_connection(self, connection: AbstractConnection) -> None:
        try:
            await super().ensure_connection(connection)
        except AuthenticationError:
            raise
        except (RedisConnectionError, RedisTimeoutError, OSError) as error:
            raise NotTaken(str(error)) from error


class _SentinelPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connects to the primary of a service. Every new connection asks the Sentinels for it."""

    async def get_master_address(self) -> tuple[str, int]:
        before = self.master_address
        try:
            address: tuple[str, int] = await super().get_master_address()
        except asyncio.CancelledError:  # a Sentinel was silent: the next call asks another first
            sentinels = self.sentinel_manager.sentinels
            sentinels.append(sentinels.pop(0))
            raise
        except MasterNotFoundError as error:  # its text is the library's view of every client
            kinds = ", ".join(re.findall(r"\w+Error\b", str(error)))
            raise RedisConnectionError(
                f"no Sentinel names a primary of {self.service_name!r} that is up"
                + (f" ({kinds})" if kinds else "")
            ) from error
        if before not in (None, address):  # idle connections are closed: close those in use, too
            await self.update_active_connections_for_reconnect()
        return address

    async def aclose(self) -> None:
        await super().aclose()
        await self.sentinel_manager.aclose()


def _sentinel_pool(url: str, options: Mapping[str, Any]) -> _SentinelPool:
    """`url`: SCHEME+sentinel://[USER:PASSWORD@]HOST[:PORT],.../SERVICE[/DB][?OPTIONS]."""
    hosts, path, given = _parts(url, "sentinel")
    service, _, db = path.partition("/")
    if not service:
        raise ValueError(f"the service that the Sentinels watch is missing after {hosts}/")
    if db and not db.isdecimal():
        raise ValueError(f"the database after /{service}/ is {db!r}; it must be a number")
    if db:
        given.setdefault("db", int(db))
    tls = {name: value for name, value in given.items() if name.startswith("ssl_")}
    if given.pop("connection_class", None) is not None:
        tls["ssl"] = True
    own = {
        name.removeprefix("sentinel_"): given.pop(name)
        for name in ("sentinel_username", "sentinel_password")
        if name in given
    }
    asking = {name: options[name] for name in ("retry", "protocol", "driver_info")} | {
        "socket_connect_timeout": SENTINEL_TIMEOUT_S,
        "socket_timeout": SENTINEL_TIMEOUT_S,
    }
    addresses = _addresses(hosts, SENTINEL_PORT, "Sentinel")
    try:
        sentinels = Sentinel(addresses, sentinel_kwargs={**asking, **tls, **own})
    except TypeError as error:
        raise ValueError(f"an option after the question mark is unknown: {error}") from error
    kind = SentinelManagedSSLConnection if tls.get("ssl") else SentinelManagedConnection
    return _SentinelPool(service, sentinels, connection_class=kind, **{**options, **given})


def _parts(url: str, kind: str) -> tuple[str, str, dict[str, Any]]:
    """Returns the hosts, the path and all else of SCHEME+KIND://[USER:PASSWORD@]HOSTS/PATH?OPTIONS,
    as options of connections.
    """
    scheme, _, rest = url.partition("://")
    address, _, query = rest.partition("?")
    authority, _, path = address.partition("/")
    user, _, hosts = authority.rpartition("@")
    plain = f"{scheme.removesuffix(f'+{kind}')}://{user}@{kind}/?{query}"
    given: dict[str, Any] = dict(parse_url(plain))
    del given["host"]
    return hosts, path, given


def _addresses(hosts: str, port: int, kind: str) -> list[Address]:
    """Returns the addresses of HOST[:PORT],HOST[:PORT]... Raises ValueError for a wrong one."""
    found: list[Address] = []
    for one in hosts.split(","):
        parts = urlsplit(f"//{one}")
        if not parts.hostname or parts.path:
            raise ValueError(f"{one!r} is no address of a {kind}; it must be HOST or HOST:PORT")
        found.append((parts.hostname, parts.port or port))
    return found


async def _begin(connection: Connection) -> None:
    """Authenticates a new connection, and checks that its server takes the store's writes."""
    told = await _hello(connection, b"standalone")
    if told.get(b"role") == b"replica":
        raise RedisConnectionError("this is a replica, which takes no writes")


async def _begin_in_cluster(connection: Connection) -> None:
    """Authenticates a new connection, and checks that its server is of a cluster. A replica sends
    its clients to its primary.
    """
    await _hello(connection, b"cluster")


async def _hello(connection: Connection, wanted: bytes) -> dict[bytes, Any]:
    """Authenticates a new connection; returns what its server tells of itself, perhaps nothing.

    Raises WrongServer for a server of another kind than `wanted`.
    """
    await connection.on_connect()
    await connection.send_command("HELLO", 2, check_health=False)
    try:
        answer: list[Any] = await connection.read_response()
    except ResponseError:  # unknown to the server, or not allowed to the user
        return {}
    told = dict(zip(answer[::2], answer[1::2], strict=True))
    mode = told.get(b"mode")
    if mode != wanted and mode in _MODES:
        raise WrongServer(_MODES[mode])
    return told
