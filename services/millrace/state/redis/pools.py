"""Makes the pool of connections for a URL: to one server, or to the primary that Sentinels name."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import BlockingConnectionPool, Connection, ConnectionPool
from redis.asyncio.connection import parse_url
from redis.asyncio.sentinel import (
    MasterNotFoundError,
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import RedisError, ResponseError

#: The kinds of URLs, for messages.
URLS = "redis://, rediss://, unix://, redis+sentinel:// or rediss+sentinel:// URL"
SCHEMES = ("redis", "rediss", "unix", "redis+sentinel", "rediss+sentinel")
SENTINEL_PORT = 26379
#: For a connection to a Sentinel, and for its answer; the next one is asked after it.
SENTINEL_TIMEOUT_S = 1.0

_MODES = {
    b"cluster": "this is a Redis Cluster, which Millrace does not support: use one server, or "
    "servers with Sentinels",
    b"sentinel": "this is a Sentinel: name it in a redis+sentinel:// URL, with its service",
}


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
        pool: BlockingConnectionPool = _sentinel_pool(url, options)
    else:
        pool = BlockingConnectionPool.from_url(url, **options)
    try:
        pool.make_connection()  # without connecting
    except TypeError as error:
        raise ValueError(f"an option after the question mark is unknown: {error}") from error
    return pool


async def close_idle(pool: ConnectionPool) -> None:
    """Closes the connections that no call uses, without a word to the server."""
    for connection in list(pool._available_connections):
        await connection.disconnect(nowait=True)


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
    scheme, _, rest = url.partition("://")
    address, _, query = rest.partition("?")
    authority, _, path = address.partition("/")
    user, _, hosts = authority.rpartition("@")
    service, _, db = path.partition("/")
    if not service:
        raise ValueError(f"the service that the Sentinels watch is missing after {hosts}/")
    if db and not db.isdecimal():
        raise ValueError(f"the database after /{service}/ is {db!r}; it must be a number")
    plain = f"{scheme.removesuffix('+sentinel')}://{user}@sentinel/{db}?{query}"
    given: dict[str, Any] = dict(parse_url(plain))
    del given["host"]
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
    try:
        sentinels = Sentinel(_addresses(hosts), sentinel_kwargs={**asking, **tls, **own})
    except TypeError as error:
        raise ValueError(f"an option after the question mark is unknown: {error}") from error
    kind = SentinelManagedSSLConnection if tls.get("ssl") else SentinelManagedConnection
    return _SentinelPool(service, sentinels, connection_class=kind, **{**options, **given})


def _addresses(hosts: str) -> list[tuple[str, int]]:
    """Returns the addresses of HOST[:PORT],HOST[:PORT]... Raises ValueError for a wrong one."""
    found: list[tuple[str, int]] = []
    for one in hosts.split(","):
        parts = urlsplit(f"//{one}")
        if not parts.hostname or parts.path:
            raise ValueError(f"{one!r} is no address of a Sentinel; it must be HOST or HOST:PORT")
        found.append((parts.hostname, parts.port or SENTINEL_PORT))
    return found


async def _begin(connection: Connection) -> None:
    """Authenticates a new connection, and checks that its server takes the store's writes."""
    await connection.on_connect()
    await connection.send_command("HELLO", 2, check_health=False)
    try:
        answer: list[Any] = await connection.read_response()
    except ResponseError:  # unknown to the server, or not allowed to the user
        return
    told = dict(zip(answer[::2], answer[1::2], strict=True))
    if told.get(b"mode") in _MODES:
        raise WrongServer(_MODES[told[b"mode"]])
    if told.get(b"role") == b"replica":
        raise RedisConnectionError("this is a replica, which takes no writes")
