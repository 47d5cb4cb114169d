"""The routes below `/admin/tenants`: what tenants may use, and tenants that the store keeps."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated, Any

from pydantic import Field, TypeAdapter, with_config
from typing_extensions import TypedDict

from millrace.core.config import Config, TenantConfig
from millrace.core.config.tenants import Access
from millrace.core.limits.rules import MOST_PER_DAY, MOST_PER_MINUTE, Level
from millrace.proxy.errors import ApiError, bad_field, shown
from millrace.proxy.http.admin import Guard
from millrace.proxy.http.asgi import Receive, Scope, Send, receive_body, send_document
from millrace.proxy.request.models.fields import STRICT, Within
from millrace.proxy.request.reading import read_body
from millrace.proxy.tenancy.caller import TENANT_ACCOUNT, Caller, caller_of
from millrace.proxy.tenancy.key_ring import KeyRing
from millrace.proxy.tenancy.limiter import Limiter
from millrace.proxy.tenancy.stored_tenants import StoredTenants

Json = dict[str, Any]

TENANTS_PATH = "/admin/tenants"
TENANT_PATH = TENANTS_PATH + "/{name}"

#: Hexadecimal digits of a digest that are enough to tell keys apart.
_SHOWN_DIGITS = 16
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")

_Names = Annotated[list[str], Field(max_length=64)]
_PerMinute = Annotated[int, Within(0, MOST_PER_MINUTE)]
_PerDay = Annotated[int, Within(0, MOST_PER_DAY)]
_Digest = Annotated[str, Field(json_schema_extra={"pattern": "^[0-9a-f]{64}$"})]


class _AccessWanted(TypedDict, total=False):
    models: _Names
    slo_classes: _Names
    requests_per_minute: _PerMinute
    tokens_per_minute: _PerMinute
    prompt_tokens_per_minute: _PerMinute
    generated_tokens_per_minute: _PerMinute
    tokens_per_day: _PerDay
    concurrency: _PerMinute


@with_config(STRICT)
class KeyWanted(_AccessWanted, total=False):
    """A key with an access of its own."""

    name: str
    sha256: _Digest


@with_config(STRICT)
class TenantWanted(_AccessWanted, total=False):
    """The body that writes a tenant: the fields of a table `tenants.NAME`, without the weight."""

    key_sha256: Annotated[list[_Digest], Field(max_length=1024)]
    keys: Annotated[list[KeyWanted], Field(max_length=1024)]


TENANT_BODY: TypeAdapter[Any] = TypeAdapter(TenantWanted)


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
        return await send_document(send, {"tenants": tenants})

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
            "stored": name in self._keys.stored,
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


class StoredTenantAdmin:
    """Answers PUT and DELETE of `TENANT_PATH`. `stored` is None if the setting is off."""

    def __init__(self, config: Config, stored: StoredTenants | None) -> None:
        self._guard = Guard(config.proxy)
        self._max_body_bytes = config.proxy.max_body_bytes
        self._stored = stored

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent. Raises ApiError before anything was sent."""
        self._guard.check(scope)
        if self._stored is None:
            raise ApiError(
                403, "Tenants are not kept in the store: auth.stored_keys is off.", code="off"
            )
        name = scope["path_params"]["name"]
        if not _NAME.fullmatch(name):
            raise bad_field("name", f"must fit {_NAME.pattern}, got {shown(name)}.")
        if scope["method"] == "DELETE":
            await self._stored.delete(name)
        else:
            body = await receive_body(scope, receive, self._max_body_bytes)
            await self._stored.put(name, read_body(TENANT_BODY, body))
        done = {"name": name, "stored": scope["method"] == "PUT"}
        return await send_document(send, done)


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
