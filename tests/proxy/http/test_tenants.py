"""The sender of a request, by its bearer token."""

from __future__ import annotations

import pytest

from millrace.core.config import Config, load_config
from millrace.proxy.errors import ApiError
from millrace.proxy.http.tenants import Tenants
from millrace.proxy.metrics import TenantMetrics
from millrace.telemetry.metrics import Registry
from support.tenants import config_with, key_toml, tenant_toml

TABLES = (
    tenant_toml("acme", "sk-1", "sk-2")
    + key_toml("acme", "sk-5", name="ci")
    + tenant_toml("other", "sk-3")
)
CASES = [
    ("Bearer sk-1", "acme"),
    ("bearer sk-2", "acme"),
    ("Bearer  sk-3 ", "other"),
    ("Bearer sk-5", "acme"),
    ("Bearer sk-4", "default"),
    ("Bearer", "default"),
    ("Bearer \xe9", "default"),
    ("Basic sk-1", "default"),
    ("sk-1", "default"),
    ("", "default"),
    (None, "default"),
]


def tenants(config: Config) -> Tenants:
    return Tenants(config, TenantMetrics(Registry()))


def scope(authorization: str | None) -> dict:
    given = [] if authorization is None else [(b"authorization", authorization.encode("latin-1"))]
    return {"headers": [(b"host", b"x"), *given]}


@pytest.mark.parametrize(("authorization", "name"), CASES)
async def test_a_known_key_names_its_tenant_and_anything_else_the_default_one(
    tmp_path, authorization, name
):
    known = tenants(config_with(tmp_path, TABLES))
    assert (await known.identify(scope(authorization))).tenant == name


async def test_a_key_may_come_as_anthropics_clients_send_it(tmp_path):
    known = tenants(config_with(tmp_path, TABLES, "auth.require_key=on"))
    own = (b"x-api-key", b" sk-1 ")
    assert (await known.identify({"headers": [own]})).tenant == "acme"
    both = [own, (b"authorization", b"Bearer sk-3")]
    assert (await known.identify({"headers": both})).tenant == "other"
    with pytest.raises(ApiError):
        await known.identify({"headers": [(b"x-api-key", b"sk-4")]})


@pytest.mark.parametrize(("authorization", "name"), CASES)
async def test_a_required_key_must_be_known(tmp_path, authorization, name):
    known = tenants(config_with(tmp_path, TABLES, "auth.require_key=on"))
    if name != "default":
        assert (await known.identify(scope(authorization))).tenant == name
        return
    with pytest.raises(ApiError) as caught:
        await known.identify(scope(authorization))
    assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
    assert "sk-4" not in caught.value.message


async def test_a_key_has_a_name_for_logs_which_is_never_the_key(tmp_path):
    known = tenants(config_with(tmp_path, TABLES))
    assert (await known.identify(scope("Bearer sk-5"))).key == "ci"
    name = (await known.identify(scope("Bearer sk-1"))).key
    assert len(name) == 8 and "sk-1" not in name


async def test_without_tenants_everybody_is_the_default_one():
    assert (await tenants(load_config()).identify(scope("Bearer sk-1"))).tenant == "default"
