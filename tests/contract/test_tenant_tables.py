"""What every TenantTables does, in memory, on a real redis-server and on a cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from millrace.core.config import StoreConfig
from millrace.state.open import open_tenant_tables
from millrace.state.store import StoreError
from millrace.state.tenant_tables import TenantTables
from support.stores import chosen_redis, patient


@pytest.fixture(params=["memory", "redis", "cluster"])
async def tables(request: pytest.FixtureRequest) -> AsyncIterator[TenantTables]:
    if request.param == "memory":
        opened = open_tenant_tables(StoreConfig())
        yield opened
        await opened.close()
        return
    async with chosen_redis(request, "proxy") as url:
        opened = open_tenant_tables(patient(url))
        yield opened
        await opened.close()


async def test_tables_are_written_replaced_and_removed(tables: TenantTables) -> None:
    assert await tables.all() == {}
    await tables.put("acme", b"one")
    await tables.put("other", b"\x00")
    await tables.put("acme", b"two")
    assert await tables.all() == {"acme": b"two", "other": b"\x00"}
    assert await tables.delete("acme")
    assert not await tables.delete("acme")
    assert await tables.all() == {"other": b"\x00"}


async def test_a_store_out_of_reach_is_an_error() -> None:
    tables = open_tenant_tables(StoreConfig(url="redis://127.0.0.1:1"))
    with pytest.raises(StoreError):
        await tables.all()
    await tables.close()
