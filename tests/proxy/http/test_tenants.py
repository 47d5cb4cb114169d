"""The tenant of a request, by its bearer token."""

from __future__ import annotations

from hashlib import sha256

import pytest

from millrace.core.config import TenantConfig
from millrace.proxy.http.tenants import Tenants

KEYS = {"acme": ("sk-1", "sk-2"), "other": ("sk-3",)}
TENANTS = Tenants(
    {
        name: TenantConfig(key_sha256=tuple(sha256(key.encode()).hexdigest() for key in keys))
        for name, keys in KEYS.items()
    }
)


def tenant(authorization: str | None, tenants: Tenants = TENANTS) -> str:
    given = [] if authorization is None else [(b"authorization", authorization.encode("latin-1"))]
    return tenants.of({"headers": [(b"host", b"x"), *given]})


@pytest.mark.parametrize(
    ("authorization", "name"),
    [
        ("Bearer sk-1", "acme"),
        ("bearer sk-2", "acme"),
        ("Bearer  sk-3 ", "other"),
        ("Bearer sk-4", "default"),
        ("Bearer", "default"),
        ("Bearer \xe9", "default"),
        ("Basic sk-1", "default"),
        ("sk-1", "default"),
        ("", "default"),
        (None, "default"),
    ],
)
def test_a_known_key_names_its_tenant_and_anything_else_the_default_one(
    authorization: str | None, name: str
) -> None:
    assert tenant(authorization) == name


def test_without_tenants_everybody_is_the_default_one() -> None:
    assert tenant("Bearer sk-1", Tenants({})) == "default"
