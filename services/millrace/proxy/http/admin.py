"""The /admin routes: show and change settings of the scheduler.

`proxy.admin_token`, as a bearer token, protects the routes. If no token is set, only clients on the
proxy's own machine may use them: not a request that a reverse proxy forwards, or that a page in a
browser makes.
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import orjson

from millrace.core.config import ProxyConfig
from millrace.core.priority import POLICIES
from millrace.proxy.errors import ApiError, bad_field, shown
from millrace.proxy.http.asgi import JSON, Receive, Scope, Send, header, read_json, send_json
from millrace.proxy.request.fields import (
    Json,
    Kind,
    Number,
    OneOf,
    Schema,
    String,
    check_fields,
    object_schema,
)
from millrace.proxy.request.validation import body_object
from millrace.wire.clients.scheduler_client import (
    SchedulerRefused,
    SchedulerUnavailable,
    get_settings,
    set_improvement_rate,
    set_policy,
)

METHODS = ("GET", "PUT")

_MOST_RATES = 4096  # characters
_ROW = r"[0-9]{1,6}(\.[0-9]{1,6})?:(0(\.[0-9]{1,6})?|1(\.0{1,6})?)"
_ROWS = f"{_ROW}(,{_ROW})*"

#: Headers of a request whose client is not the peer of its connection.
_RELAYED = (b"forwarded", b"x-forwarded-for", b"origin")

Fields = dict[str, Kind]
Settings = dict[str, Any]


@dataclass(frozen=True, slots=True)
class AdminRoute:
    """A setting that can be shown and changed; the functions take the scheduler's address."""

    path: str
    fields: Fields
    required: tuple[str, ...]
    show: Callable[[str], Awaitable[Settings]]
    change: Callable[[str, Settings], Awaitable[Settings]]  # with the checked fields of the body

    def change_schema(self) -> Schema:
        """Returns the body's schema. If no field is required, exactly one field must be given."""
        schema = object_schema(self.fields, self.required)
        if not self.required:
            schema["oneOf"] = [
                {"required": [name], "properties": {name: kind.schema()}}
                for name, kind in self.fields.items()
            ]
        return schema


@dataclass(frozen=True, slots=True)
class Rates:
    """Checks rows of arrivals per second and a rate, in any order; `check` returns them sorted.

    If two rows have the same arrivals, the last row counts.
    """

    def check(self, value: Json, path: str) -> str:
        text = String(1, _MOST_RATES).check(value, path)
        if not re.fullmatch(_ROWS, text):
            raise bad_field(
                path, f"write it as ARRIVALS_PER_S:RATE,... with rates 0 to 1, got {shown(text)}."
            )
        rows = dict(row.split(":") for row in text.split(","))
        by_arrivals = {float(arrivals): rate for arrivals, rate in rows.items()}
        return ",".join(f"{arrivals:f}:{by_arrivals[arrivals]}" for arrivals in sorted(by_arrivals))

    def schema(self) -> Schema:
        return {
            "type": "string",
            "maxLength": _MOST_RATES,
            "pattern": f"^{_ROWS}$",
            "description": "Table of rates by arrivals per second, as ARRIVALS_PER_S:RATE,...",
        }


async def _change_policy(address: str, wanted: Settings) -> Settings:
    return await set_policy(address, wanted["policy"])


async def _show_rate(address: str) -> Settings:
    return {"improvement_rate": (await get_settings(address))["improvement_rate"]}


async def _change_rate(address: str, wanted: Settings) -> Settings:
    if len(wanted) != 1:
        raise ApiError(
            400, "Give either rate or rates.", param="rate", code="missing_required_parameter"
        )
    (rate,) = wanted.values()
    return await set_improvement_rate(address, rate)


POLICY = AdminRoute(
    path="/admin/scheduler",
    fields={"policy": OneOf(tuple(POLICIES))},
    required=("policy",),
    show=get_settings,
    change=_change_policy,
)
IMPROVEMENT_RATE = AdminRoute(
    path="/admin/improvement-rate",
    fields={
        "rate": Number(0.0, 1.0, doc="Fixed rate."),
        "rates": Rates(),
    },
    required=(),
    show=_show_rate,
    change=_change_rate,
)
ROUTES = (POLICY, IMPROVEMENT_RATE)


class SchedulerAdmin:
    """Answers GET and PUT of one route by asking the scheduler at `address`."""

    def __init__(self, config: ProxyConfig, address: str, route: AdminRoute) -> None:
        self._route = route
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
                found = await self._route.show(self._address)
        except SchedulerUnavailable as error:
            raise ApiError(503, str(error), code="unavailable", retry_after_s=1.0) from error
        await send_json(send, 200, orjson.dumps(found), JSON)
        return 200

    async def _change(self, body: object) -> Settings:
        wanted = check_fields(body_object(body), self._route.fields, self._route.required)
        try:
            return await self._route.change(self._address, wanted)
        except SchedulerRefused as error:
            param = next(iter(wanted))
            raise ApiError(400, f"{error}.", param=param, code="invalid_value") from error

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
