"""/admin/scheduler: what administrators see of the scheduler, and change.

Guarded by `proxy.admin_token` as a bearer token. Without one, only clients on this machine are let
in, and none that a reverse proxy here, or a page in somebody's browser, speaks for.
"""

from __future__ import annotations

import hmac
import ipaddress
from typing import Any

import orjson

from millrace.core.config import ProxyConfig
from millrace.core.priority import POLICIES
from millrace.proxy.errors import ApiError
from millrace.proxy.fields import Kind, Schema, String, check_fields, object_schema
from millrace.proxy.http import JSON, Receive, Scope, Send, header, read_json, send_json
from millrace.proxy.validation import body_object
from millrace.wire.scheduler_client import (
    SchedulerRefused,
    SchedulerUnavailable,
    get_settings,
    set_policy,
)

PATH = "/admin/scheduler"
METHODS = ("GET", "PUT")
#: A request with one of these comes from further away than its connection.
_RELAYED = (b"forwarded", b"x-forwarded-for", b"origin")

FIELDS: dict[str, Kind] = {"policy": String(1, 64, "One of " + ", ".join(POLICIES) + ".")}


def change_schema() -> Schema:
    return object_schema(FIELDS, ("policy",))


class SchedulerAdmin:
    """Answers GET and PUT by asking the scheduler at `address`."""

    def __init__(self, config: ProxyConfig, address: str) -> None:
        self._token = config.admin_token.encode()
        self._max_body_bytes = config.max_body_bytes
        self._address = address

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent. Raises ApiError before anything was sent."""
        self._check_allowed(scope)
        try:
            if scope["method"] == "PUT":
                found = await self._change(await read_json(scope, receive, self._max_body_bytes))
            else:
                found = await get_settings(self._address)
        except SchedulerUnavailable as error:
            raise ApiError(503, str(error), code="unavailable", retry_after_s=1.0) from error
        await send_json(send, 200, orjson.dumps(found), JSON)
        return 200

    async def _change(self, body: object) -> dict[str, Any]:
        wanted = check_fields(body_object(body), FIELDS, ("policy",))
        try:
            return await set_policy(self._address, wanted["policy"])
        except SchedulerRefused as error:
            raise ApiError(400, f"{error}.", param="policy", code="invalid_value") from error

    def _check_allowed(self, scope: Scope) -> None:
        if self._token:
            given = (header(scope, b"authorization") or "").encode("latin-1")
            if not hmac.compare_digest(given, b"Bearer " + self._token):
                raise ApiError(
                    401, "This route needs proxy.admin_token as a bearer token.", code="bad_token"
                )
        elif not _is_local(scope):
            raise ApiError(
                403,
                "Without proxy.admin_token this route is for clients on the proxy's own machine.",
                code="not_local",
            )


def _is_local(scope: Scope) -> bool:
    if any(header(scope, name) is not None for name in _RELAYED):
        return False
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(client[0] if client else "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback
