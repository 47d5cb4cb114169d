"""Finds the model that a body names, before the body is read by that model's own types."""

from __future__ import annotations

import re

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

#: The first field of a body. Millions of token ids may follow, which would take long to parse.
_FIRST = re.compile(rb'\s*\{\s*"model"\s*:\s*"([^"\\\x00-\x1f]*)"')


class _Body(TypedDict, total=False):
    model: str


_BODY = TypeAdapter(_Body)


def asked_model(body: bytes) -> str | None:
    """Returns the field `model` of a JSON body; None if it is absent or wrong."""
    try:
        if (first := _FIRST.match(body)) is not None:
            return first[1].decode()
        found: _Body = _BODY.validator.validate_json(body)
    except (UnicodeDecodeError, ValidationError):
        return None
    return found.get("model")
