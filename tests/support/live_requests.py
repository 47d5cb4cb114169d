"""Requests under way, as far along as a test wants them."""

from __future__ import annotations

from dataclasses import fields

from millrace.core.live_request import LiveRequest
from millrace.core.request import Request

_ASKED = frozenset(field.name for field in fields(Request))


def live_request(id: str = "r", **values: object) -> LiveRequest:
    """A request with these fields of `Request`, and these fields of its progress."""
    asked = {"proxy_id": "x", "prompt_tokens": 1, "max_new_tokens": 1}
    asked |= {name: value for name, value in values.items() if name in _ASKED}
    found = LiveRequest(Request(id=id, **asked))
    for name in values.keys() - _ASKED:
        setattr(found, name, values[name])
    return found
