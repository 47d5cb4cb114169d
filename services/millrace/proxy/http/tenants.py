"""Finds the tenant of a request by its API key."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from millrace.core.config import TenantConfig
from millrace.core.weights import DEFAULT_TENANT
from millrace.proxy.http.asgi import Scope, header

#: The key of a scope that names the tenant of a call from within the proxy, which has no headers of
#: a client. Clients can't set keys of a scope.
TENANT_KEY = "millrace.tenant"


class Tenants:
    """Looks up the digests of keys.

    A request without a key, or with an unknown key, belongs to the tenant `default`, whatever the
    key: new keys bring nobody a share of their own. No key is kept or logged, not even in a cache:
    SHA-256 of a key takes about a microsecond.
    """

    def __init__(self, tenants: Mapping[str, TenantConfig]) -> None:
        self._names = {
            bytes.fromhex(digest): name
            for name, tenant in tenants.items()
            for digest in tenant.key_sha256
        }

    def of(self, scope: Scope) -> str:
        """Returns the name of the tenant whose key is the request's bearer token."""
        given = scope.get(TENANT_KEY)
        if given is not None:
            return str(given)
        if not self._names:
            return DEFAULT_TENANT
        scheme, _, key = (header(scope, b"authorization") or "").partition(" ")
        if scheme.lower() != "bearer":
            return DEFAULT_TENANT
        digest = sha256(key.strip().encode("latin-1")).digest()
        return self._names.get(digest, DEFAULT_TENANT)
