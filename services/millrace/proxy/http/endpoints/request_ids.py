"""Ids that clients choose for their requests, to ask for a request that is not yet answered."""

from __future__ import annotations

import re
from hashlib import sha256

from millrace.proxy.errors import bad_field, shown
from millrace.proxy.http.asgi import Scope, header

ID_HEADER = "x-millrace-request-id"

_CHOSEN = re.compile(r"[A-Za-z0-9._-]{1,64}")


def chosen_id(scope: Scope) -> str:
    """Returns the id in the request's header; empty without one. Raises ApiError if malformed."""
    text = header(scope, ID_HEADER.encode())
    if text is None:
        return ""
    if _CHOSEN.fullmatch(text) is None:
        wanted = "must be 1 to 64 letters, digits, '.', '_' or '-'"
        raise bad_field(ID_HEADER, f"{wanted}, got {shown(text)}.")
    return text


def id_digits(tenant: str, chosen: str) -> str:
    """Returns the digits of the response's id for a chosen id.

    Two tenants may choose the same id, and no client can name a response of another tenant.
    """
    return sha256(f"{tenant}\0{chosen}".encode()).hexdigest()[:32]


def candidates(tenant: str, request_id: str) -> list[str]:
    """Returns the responses that a client may mean by `request_id`, an id or a chosen id."""
    if _CHOSEN.fullmatch(request_id) is None:
        return []
    digits = id_digits(tenant, request_id)
    return [request_id, *(f"{prefix}{digits}" for prefix in ("chatcmpl-", "cmpl-", "msg_"))]
