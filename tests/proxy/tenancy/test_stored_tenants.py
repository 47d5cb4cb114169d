"""Tenants of the store beside those of the settings, also while the store is away."""

from __future__ import annotations

import json

from millrace.core.config import Config, load_config
from millrace.proxy.tenancy.key_ring import KeyRing
from millrace.proxy.tenancy.stored_tenants import StoredTenants
from millrace.state.store import StoreError
from millrace.state.tenant_tables import MemoryTenantTables
from support.tenants import config_with, digest, tenant_toml


class Tables(MemoryTenantTables):
    """Fails while `is_away`."""

    is_away = False

    async def all(self) -> dict[str, bytes]:
        if self.is_away:
            raise StoreError("it is away")
        return await super().all()


def stored(config: Config | None = None) -> tuple[KeyRing, Tables, StoredTenants]:
    keys, tables = KeyRing(config or load_config()), Tables()
    return keys, tables, StoredTenants(tables, keys)


def table(key: str, **fields: object) -> bytes:
    return json.dumps({"key_sha256": [digest(key)], **fields}).encode()


def tenant_of(keys: KeyRing, key: str) -> str | None:
    found = keys.find(bytes.fromhex(digest(key)))
    return None if found is None else found.tenant


async def test_the_last_tenants_stay_in_use_while_the_store_is_away(caplog):
    keys, tables, tenants = stored()
    await tables.put("acme", table("sk-1"))
    await tenants.read()
    tables.is_away = True
    for _ in range(3):
        await tenants.read()
    assert tenant_of(keys, "sk-1") == "acme"
    assert len([one for one in caplog.records if "stay in use" in one.getMessage()]) == 1
    tables.is_away = False
    await tables.delete("acme")
    await tenants.read()
    assert tenant_of(keys, "sk-1") is None


async def test_a_wrong_table_is_left_out_alone(caplog, tmp_path):
    """Another release, or another program, may have written it."""
    config = config_with(tmp_path, tenant_toml("acme", "sk-0"))
    keys, tables, tenants = stored(config)
    await tables.put("broken", b"{")
    await tables.put("classes", table("sk-1", slo_classes=["no such class"]))
    await tables.put("good", table("sk-2"))
    await tables.put("thief", table("sk-0"))
    await tenants.read()
    found = [tenant_of(keys, f"sk-{number}") for number in range(3)]
    assert found == ["acme", None, "good"]
    assert sorted(keys.stored) == ["good"]
    left_out = [one.getMessage() for one in caplog.records if "left out" in one.getMessage()]
    assert len(left_out) == 3


async def test_the_store_replaces_the_access_of_a_tenant_of_the_settings(tmp_path):
    config = config_with(tmp_path, tenant_toml("acme", "sk-0", weight=3, concurrency=1))
    keys, tables, tenants = stored(config)
    await tables.put("acme", table("sk-1", concurrency=9))
    await tenants.read()
    assert [tenant_of(keys, key) for key in ("sk-0", "sk-1")] == ["acme", "acme"]
    acme = keys.tenants["acme"]
    assert (acme.weight, acme.access.limits.concurrency) == (3.0, 9)
