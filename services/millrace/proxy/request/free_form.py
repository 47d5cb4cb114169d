"""Fields that hold any JSON of the client, nested to a limited depth."""

from __future__ import annotations

import json
from dataclasses import dataclass

from millrace.proxy.errors import ApiError, bad_field
from millrace.proxy.request.fields import Json, Schema, String, documented, wrong_type

#: Levels of arrays and objects: readers of such JSON (a chat template, a log) recurse.
MOST_LEVELS = 100


@dataclass(frozen=True, slots=True)
class AnyObject:
    """An object with any content, nested MOST_LEVELS deep at most."""

    doc: str = ""

    def check(self, value: Json, path: str) -> dict[str, Json]:
        if not isinstance(value, dict):
            raise wrong_type(path, "an object", value)
        check_levels(value, path)
        return value

    def schema(self) -> Schema:
        return documented({"type": "object"}, self.doc)


@dataclass(frozen=True, slots=True)
class JsonText:
    """A string that should hold JSON, nested MOST_LEVELS deep at most; other text is accepted."""

    def check(self, value: Json, path: str) -> str:
        text = String().check(value, path)
        try:
            check_levels(json.loads(text), path)
        except RecursionError:
            raise _too_deep(path) from None
        except ValueError:
            return text  # models write such arguments; chat templates show them unchanged
        return text

    def schema(self) -> Schema:
        return {"type": "string"}


def check_levels(value: Json, path: str) -> None:
    """Raises ApiError for arrays and objects that are nested deeper than MOST_LEVELS."""
    level = [value]
    for _ in range(MOST_LEVELS):
        level = [
            item
            for outer in level
            if isinstance(outer, dict | list)
            for item in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return
    if any(isinstance(item, dict | list) for item in level):
        raise _too_deep(path)


def _too_deep(path: str) -> ApiError:
    return bad_field(path, f"its JSON must be nested at most {MOST_LEVELS} levels deep, got more.")
