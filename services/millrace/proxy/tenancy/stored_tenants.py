"""Tenants that administrators write at the proxy: kept in the store, in use at every replica.

Each replica reads the tables once a second. While the store is out of reach, the last tables stay
in use.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable
from typing import Any, TypeVar

import orjson

from millrace.core.config import TenantConfig
from millrace.core.config.tenants import read_tenants
from millrace.core.errors import ConfigError
from millrace.proxy.errors import ApiError, reachable
from millrace.proxy.tenancy.key_ring import KeyRing
from millrace.state.store import StoreError
from millrace.state.tenant_tables import TenantTables

log = logging.getLogger(__name__)

T = TypeVar("T")

READ_S = 1.0


class StoredTenants:
    """Reads, writes and removes tables of tenants."""

    def __init__(self, tables: TenantTables, keys: KeyRing) -> None:
        self._tables = tables
        self._keys = keys
        self._seen: dict[str, bytes] = {}
        self._reading: asyncio.Task[None] | None = None
        self._trouble = ""

    async def start(self) -> None:
        """Reads the tables now, and then every second."""
        await self.read()
        self._reading = asyncio.create_task(self._read_on())

    async def read(self) -> None:
        """Puts the tables of the store in use; a wrong table is left out, and the log says so."""
        try:
            found = await self._tables.all()
        except StoreError as error:
            self._complain(f"the last tenants of the store stay in use: {error}")
            return
        self._trouble = ""
        if found == self._seen:
            return
        self._seen = found
        tenants: dict[str, TenantConfig] = {}
        for name, table in sorted(found.items()):
            try:
                one = read_tenants({name: orjson.loads(table)})
                self._keys.use_stored(tenants | one)
                tenants |= one
            except (ConfigError, ValueError) as error:
                log.error("tenant %s of the store is left out: %s", name, error)
        self._keys.use_stored(tenants)

    async def put(self, name: str, table: dict[str, Any]) -> None:
        """Writes a table. Raises ApiError: 400 with the reason for a wrong one, 503."""
        stored = {one: config for one, config in self._keys.stored.items() if one != name}
        try:
            self._keys.check_stored(stored | read_tenants({name: table}))
        except ConfigError as error:
            raise ApiError(400, f"{error}.", code="invalid_value") from error
        await self._write(self._tables.put(name, orjson.dumps(table)))

    async def delete(self, name: str) -> None:
        """Removes a table. Raises ApiError: 404 if there is none, 503."""
        if not await self._write(self._tables.delete(name)):
            raise ApiError(404, f"The store has no tenant {name}.", code="unknown_tenant")

    async def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        await self._tables.close()

    async def _write(self, work: Awaitable[T]) -> T:
        with reachable("tenants"):
            done = await work
        await self.read()
        return done

    async def _read_on(self) -> None:
        while True:
            await asyncio.sleep(READ_S)
            await self.read()

    def _complain(self, trouble: str) -> None:
        if trouble != self._trouble:
            self._trouble = trouble
            log.warning("%s", trouble)
