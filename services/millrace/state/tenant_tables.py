"""Keeps the tables of tenants that administrators write at the proxy, for all of its replicas.

Tables are opaque here: the proxy checks them before it writes, and again after it reads.
"""

from __future__ import annotations

from typing import Protocol

from millrace.core.config import StoreConfig
from millrace.state.redis.keys import key_of
from millrace.state.redis.link import LARGE_ANSWER_S, RedisLink, as_bytes


class TenantTables(Protocol):
    """Tables by the tenant's name. Every method raises StoreError if the store is unreachable."""

    async def all(self) -> dict[str, bytes]:
        """Returns all tables."""

    async def put(self, name: str, table: bytes) -> None:
        """Writes a table, or replaces it."""

    async def delete(self, name: str) -> bool:
        """Removes a table; returns whether there was one."""

    async def close(self) -> None:
        """Closes the store's connections."""


class MemoryTenantTables:
    """TenantTables in a dictionary."""

    def __init__(self) -> None:
        self._tables: dict[str, bytes] = {}

    async def all(self) -> dict[str, bytes]:
        return dict(self._tables)

    async def put(self, name: str, table: bytes) -> None:
        self._tables[name] = table

    async def delete(self, name: str) -> bool:
        return self._tables.pop(name, None) is not None

    async def close(self) -> None:
        self._tables.clear()


class RedisTenantTables:
    """TenantTables in a hash of Redis, which never expires."""

    def __init__(self, config: StoreConfig) -> None:
        """Connects at the first call. Raises ConfigError when `config.url` is not valid."""
        self._link = RedisLink(config)
        self._key = key_of(config.key_prefix, "tenants")

    async def all(self) -> dict[str, bytes]:
        found = await self._link.again(
            self._key, lambda client: client.hgetall(self._key), LARGE_ANSWER_S
        )
        return {as_bytes(name).decode(): as_bytes(table) for name, table in found.items()}

    async def put(self, name: str, table: bytes) -> None:
        await self._link.again(self._key, lambda client: client.hset(self._key, name, table))

    async def delete(self, name: str) -> bool:
        # Once: a second attempt could not tell whether there was a table.
        return bool(await self._link.once(self._key, lambda client: client.hdel(self._key, name)))

    async def close(self) -> None:
        await self._link.close()
