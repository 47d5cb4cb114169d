"""Finds the model that a body names, before the body is read by that model's own types."""

from __future__ import annotations

import re

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

#: A quote inside a JSON string has a backslash before it, so these bytes end and begin a string.
_KEY = b'"model"'
_NAMED = re.compile(rb'"model"\s*:\s*"([^"\\\x00-\x1f]*)"')


class _Body(TypedDict, total=False):
    model: str


_BODY = TypeAdapter(_Body)


def asked_model(body: bytes) -> str | None:
    """Returns the field `model` of a JSON body; None if it is absent or wrong.

    A body in which the key may be a nested one is parsed. So is a name with an escape.
    """
    at = body.find(_KEY)
    if at >= 0 and body.find(_KEY, at + 1) < 0 and (plain := _NAMED.match(body, at)) is not None:
        try:
            return plain[1].decode()
        except UnicodeDecodeError:
            return None
    try:
        found: _Body = _BODY.validator.validate_json(body)
    except ValidationError:
        return None
    return found.get("model")
