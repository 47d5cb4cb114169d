"""`GET /admin/tenants`: what tenants may use, and what their limits leave at this moment."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import orjson

from millrace.core.config import Config, TenantConfig
from millrace.core.config.tenants import Access
from millrace.core.limits.rules import Level
from millrace.proxy.http.admin import Guard
from millrace.proxy.http.asgi import JSON, Receive, Scope, Send, send_json
from millrace.proxy.tenancy.caller import TENANT_ACCOUNT, Caller, caller_of
from millrace.proxy.tenancy.key_ring import KeyRing
from millrace.proxy.tenancy.limiter import Limiter

Json = dict[str, Any]

TENANTS_PATH = "/admin/tenants"

#: Hexadecimal digits of a digest that are enough to tell keys apart.
_SHOWN_DIGITS = 16


class TenantAdmin:
    """Answers GET of `TENANTS_PATH`."""

    def __init__(self, config: Config, keys: KeyRing, limiter: Limiter) -> None:
        self._guard = Guard(config.proxy)
        self._keys = keys
        self._limiter = limiter

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent. Raises ApiError before anything was sent."""
        del receive  # a GET
        self._guard.check(scope)
        tenants = [await self._tenant(*found) for found in sorted(self._keys.tenants.items())]
        await send_json(send, 200, orjson.dumps({"tenants": tenants}), JSON)
        return 200

    async def _tenant(self, name: str, config: TenantConfig) -> Json:
        shared = [
            {"name": digest[:8], "sha256": digest[:_SHOWN_DIGITS], **_access(Access()), "left": []}
            for digest in config.key_sha256
        ]
        own = []
        for key in config.keys:
            caller = caller_of(name, config, key=key.name, own=key.access, digest=key.sha256)
            own.append(
                {
                    "name": key.name,
                    "sha256": key.sha256[:_SHOWN_DIGITS],
                    **_access(key.access),
                    "left": await self._left(caller, own=True),
                }
            )
        return {
            "name": name,
            "weight": config.weight,
            **_access(config.access),
            "left": await self._left(caller_of(name, config), own=False),
            "keys": shared + own,
        }

    async def _left(self, caller: Caller, *, own: bool) -> list[Json]:
        """Returns the levels of the tenant's account, or of the key's own."""
        found = [
            level
            for account in caller.accounts
            if (account.name != TENANT_ACCOUNT) == own
            for level in (await self._limiter.levels(caller, account)).levels
        ]
        return [_level(level) for level in found]


def _access(access: Access) -> Json:
    limits = {name: value for name, value in asdict(access.limits).items() if value}
    return {
        "models": list(access.models),
        "slo_classes": list(access.slo_classes),
        "limits": limits,
    }


def _level(level: Level) -> Json:
    return {
        "meter": level.meter,
        "limit": level.limit,
        "used": level.used,
        "left": level.left,
        "reset_s": level.reset_ms / 1000,
    }
