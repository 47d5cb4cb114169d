"""The models of the gateway's explanations, from which its OpenAPI document is made."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict


class RequestsAhead(TypedDict):
    """The requests of one part of the order that go before it."""

    part: str
    requests: int
    seconds: float


class Waited(TypedDict):
    """How long it waited for one thing while in one part of the order."""

    reason: str
    part: str
    seconds: float


class RequestBefore(TypedDict):
    """One request that goes before it: its part of the order, its key, and its prefill."""

    request_id: str
    part: str
    key: str
    seconds: float


class Help(TypedDict):
    """One thing that would have helped, and the seconds that it saves at most."""

    what: str
    saves_s: float


class _Explained(TypedDict):
    request_id: str
    state: str
    slo_class: str
    policy: str
    part: str
    key: str
    left_s: float
    deadline_in_s: float | None
    first_token_s: float | None
    in_time: bool | None
    attainment: float | None
    value: float | None
    stretch: float | None
    ahead: list[RequestsAhead]
    waited: list[Waited]
    helps: list[Help]


class Explanation(_Explained):
    """Why a request waits, or waited. Texts are empty and numbers null where nothing is known."""

    waits_for: str
    suspended_by: list[str]
    before: list[RequestBefore]


class RequestExplanation(_Explained):
    """The same for the request's own client: no other request and no instance is named.

    `earlier`: of the request before it was migrated, or adopted by another replica of the proxy.
    """

    object: Literal["millrace.explanation"]
    earlier: NotRequired[_Explained]
