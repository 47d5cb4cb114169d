"""The /admin routes: show and change settings of the scheduler.

`proxy.admin_token`, as a bearer token, protects the routes. If no token is set, only clients on the
proxy's own machine may use them, by a name of this machine: not a request that a reverse proxy
forwards, or that a page in a browser makes, unless it is a page of this proxy (the board).
"""

from __future__ import annotations

import hmac
import ipaddress
import re
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from millrace.core.config import ProxyConfig
from millrace.core.priority import POLICIES
from millrace.core.scheduler.explanation.explain import Explanation
from millrace.core.weights import LEAST_WEIGHT, MOST_WEIGHT, Weights
from millrace.proxy.errors import ApiError, shown, unavailable
from millrace.proxy.http.asgi import Receive, Scope, Send, header, receive_body, send_document
from millrace.proxy.http.query import query_of
from millrace.proxy.request.models.fields import STRICT, OneOf, Within
from millrace.proxy.request.reading import read_body
from millrace.proxy.tracing.waterfalls import Waterfalls
from millrace.wire.clients.scheduler_client import (
    SchedulerRefused,
    SchedulerUnavailable,
    UnknownRequest,
    explain,
    get_settings,
    set_improvement_rate,
    set_policy,
)

METHODS = ("GET", "PUT")

_ROW = r"[0-9]{1,6}(\.[0-9]{1,6})?:(0(\.[0-9]{1,6})?|1(\.0{1,6})?)"
_ROWS = f"{_ROW}(,{_ROW})*"

#: Headers of a request whose client is not the peer of its connection.
_RELAYED = (b"forwarded", b"x-forwarded-for")
#: `Host` with a name of this machine that no other machine's page can have as its origin.
_LOOPBACK = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?", re.ASCII | re.IGNORECASE)

Settings = dict[str, Any]


_Weights = dict[str, Annotated[float, Within(LEAST_WEIGHT, MOST_WEIGHT)]]


@with_config(STRICT)
class WeightsWanted(TypedDict, total=False):
    """Weights by name; a class or a tenant that is not named keeps its weight."""

    classes: Annotated[_Weights, Field(description="Of SLO classes that are configured.")]
    tenants: Annotated[_Weights, Field(description="Of tenants that are configured.")]


@with_config(ConfigDict(**STRICT, json_schema_extra={"minProperties": 1}))
class PolicyWanted(TypedDict, total=False):
    """The body that changes the policy, weights, or both."""

    policy: Annotated[str, OneOf(*POLICIES)]
    weights: WeightsWanted


def _sorted_rows(text: str) -> str:
    """Returns the rows sorted. If two rows have the same arrivals, the last row counts."""
    if not re.fullmatch(_ROWS, text):
        wanted = "write it as ARRIVALS_PER_S:RATE,... with rates 0 to 1"
        raise PydanticCustomError("invalid_value", f"{wanted}, got {shown(text)}.")
    rows = dict(row.split(":") for row in text.split(","))
    by_arrivals = {float(arrivals): rate for arrivals, rate in rows.items()}
    return ",".join(f"{arrivals:f}:{by_arrivals[arrivals]}" for arrivals in sorted(by_arrivals))


_ONE_OF_BOTH: dict[str, Any] = {
    "oneOf": [
        {"required": ["rate"], "properties": {"rate": {"type": "number"}}},
        {"required": ["rates"], "properties": {"rates": {"type": "string"}}},
    ]
}


@with_config(ConfigDict(**STRICT, json_schema_extra=_ONE_OF_BOTH))
class ImprovementRateWanted(TypedDict, total=False):
    """The body that changes the improvement rate: exactly one of the fields is given."""

    rate: Annotated[float | None, Within(0, 1), Field(description="Fixed rate.")]
    rates: Annotated[
        Annotated[
            str,
            Field(min_length=1, max_length=4096, json_schema_extra={"pattern": f"^{_ROWS}$"}),
            AfterValidator(_sorted_rows),
        ]
        | None,
        Field(description="Table of rates by arrivals per second, as ARRIVALS_PER_S:RATE,..."),
    ]


@dataclass(frozen=True, slots=True)
class AdminRoute:
    """A setting that can be shown and changed; the functions take the scheduler's address."""

    path: str
    body: TypeAdapter[Any]
    show: Callable[[str], Awaitable[Settings]]
    change: Callable[[str, Settings], Awaitable[Settings]]  # with the fields that the body gives


async def _change_policy(address: str, wanted: Settings) -> Settings:
    weights = Weights(**wanted["weights"]) if "weights" in wanted else None
    if "policy" not in wanted and weights in (None, Weights()):
        param = "weights" if "weights" in wanted else "policy"
        raise ApiError(
            400, "Give policy, weights or both.", param=param, code="missing_required_parameter"
        )
    return await set_policy(address, wanted.get("policy", ""), weights)


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
    body=TypeAdapter(PolicyWanted),
    show=get_settings,
    change=_change_policy,
)
IMPROVEMENT_RATE = AdminRoute(
    path="/admin/improvement-rate",
    body=TypeAdapter(ImprovementRateWanted),
    show=_show_rate,
    change=_change_rate,
)
ROUTES = (POLICY, IMPROVEMENT_RATE)


#: The served models, whose names `?model=` takes.
MODELS_PATH = "/admin/models"
#: Of one request: why it waits, or waited.
REQUEST_PATH = "/admin/requests/{id}"
#: Where the time of one request went.
TRACE_PATH = REQUEST_PATH + "/trace"


class ModelsAdmin:
    """Answers GET of `MODELS_PATH`."""

    def __init__(self, config: ProxyConfig, names: Callable[[], list[str]]) -> None:
        self._guard = Guard(config)
        self._names = names

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent. Raises ApiError before anything was sent."""
        del receive  # a GET
        self._guard.check(scope)
        return await send_document(send, {"models": self._names()})


class RequestAdmin:
    """Answers GET of `REQUEST_PATH` by asking the schedulers."""

    def __init__(self, config: ProxyConfig, schedulers: Callable[[], Iterable[str]]) -> None:
        """`schedulers` returns their addresses."""
        self._guard = Guard(config)
        self._schedulers = schedulers

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent. Raises ApiError before anything was sent."""
        del receive  # a GET
        self._guard.check(scope)
        return await send_document(send, asdict(await self._find(scope["path_params"]["id"])))

    async def _find(self, request_id: str) -> Explanation:
        """Asks one scheduler after another. Raises ApiError: 404, or 503 if one does not answer."""
        failure = ApiError(404, "No model is served.", code="unknown_request")
        for address in self._schedulers():
            try:
                return await explain(address, request_id)
            except UnknownRequest as error:
                if failure.status != 503:
                    failure = ApiError(404, f"{error}.", code="unknown_request")
            except SchedulerUnavailable as error:
                failure = unavailable(str(error))
        raise failure


class TraceAdmin:
    """Answers GET of `TRACE_PATH`, of any tenant's request."""

    def __init__(self, config: ProxyConfig, waterfalls: Waterfalls) -> None:
        self._guard = Guard(config)
        self._waterfalls = waterfalls

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent. Raises ApiError before anything was sent."""
        del receive  # a GET
        self._guard.check(scope)
        request_id = scope["path_params"]["id"]
        found = await self._waterfalls.find(_responses(request_id), None)
        if found is None:
            message = f"Request with id {shown(request_id)} not found."
            raise ApiError(404, message, code="unknown_request")
        return await send_document(send, {"object": "millrace.trace", **found})


def _responses(request_id: str) -> list[str]:
    """Returns the ids of the responses that a request may be part of: it may be one of several
    prompts, and may have been migrated, as a whole (`ID.1`) or as one of its choices (`ID.c0.1`).
    """
    first = re.sub(r"(\.c?[0-9]+)+$", "", request_id)
    return [request_id, first, re.sub(r"-[0-9]+$", "", first)]


class SchedulerAdmin:
    """Answers GET and PUT of one route by asking a scheduler.

    It is that of the model in the query (`?model=NAME`), by default the first model's.
    """

    def __init__(
        self, config: ProxyConfig, scheduler_of: Callable[[str | None], str], route: AdminRoute
    ) -> None:
        """`scheduler_of` returns the address by the model's name. It raises ApiError (404)."""
        self._route = route
        self._guard = Guard(config)
        self._max_body_bytes = config.max_body_bytes
        self._scheduler_of = scheduler_of

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent. Raises ApiError before anything was sent."""
        self._guard.check(scope)
        address = self._scheduler_of(query_of(scope).get("model"))
        try:
            if scope["method"] == "PUT":
                body = await receive_body(scope, receive, self._max_body_bytes)
                found = await self._change(address, body)
            else:
                found = await self._route.show(address)
        except SchedulerUnavailable as error:
            raise ApiError(503, str(error), code="unavailable", retry_after_s=1.0) from error
        return await send_document(send, found)

    async def _change(self, address: str, body: bytes) -> Settings:
        wanted = read_body(self._route.body, body)
        try:
            return await self._route.change(address, wanted)
        except SchedulerRefused as error:
            named = (name for name in wanted if str(error).startswith(name))
            param = next(named, next(iter(wanted)))
            raise ApiError(400, f"{error}.", param=param, code="invalid_value") from error


class Guard:
    """Lets administrators in: by the token, or from this machine where none is set."""

    def __init__(self, config: ProxyConfig) -> None:
        self._token = config.admin_token.encode()

    def check(self, scope: Scope) -> None:
        """Raises ApiError for others."""
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
    if any(header(scope, name) is not None for name in _RELAYED) or _is_of_other_page(scope):
        return False
    client = scope.get("client")
    try:
        address = ipaddress.ip_address(client[0] if client else "")
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (mapped or address).is_loopback


def _is_of_other_page(scope: Scope) -> bool:
    """Returns whether a page asks that is not this proxy's own at a loopback address.

    A browser sends no origin when a page reads from its own server. A page of another server may
    do that here, under a name of its own that it has led to this machine: `Host` shows the name.
    """
    origin, host = header(scope, b"origin"), header(scope, b"host")
    if host is not None and not _LOOPBACK.fullmatch(host):
        return True
    return origin is not None and origin != f"http://{host}"
