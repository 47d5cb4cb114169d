"""Makes the constraint of an answer that must be calls: a JSON array of names and arguments.

The form is Millrace's own and the same for every model family, so every answer can be parsed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from millrace.core.request_spec import Constraint

#: Keywords whose value is data: references in it are texts.
_DATA = frozenset({"const", "enum", "default", "examples"})


def forced_calls(schemas: Mapping[str, Any], *, most: int | None) -> Constraint:
    """Returns the constraint of one call or more, `most` at most, of functions in `schemas`.

    References in a function's schema point into its place in the whole schema.
    """
    places = {name: f"function{i}" for i, name in enumerate(schemas)}
    calls = [
        {
            "type": "object",
            "properties": {
                "name": {"const": name},
                "arguments": {"$ref": f"#/$defs/{places[name]}"},
            },
            "required": ["name", "arguments"],
            "additionalProperties": False,
        }
        for name in schemas
    ]
    schema: dict[str, Any] = {
        "type": "array",
        "items": calls[0] if len(calls) == 1 else {"anyOf": calls},
        "minItems": 1,
        "$defs": {
            places[name]: _moved({"type": "object", **given}, f"#/$defs/{places[name]}")
            for name, given in schemas.items()
        },
    }
    if most is not None:
        schema["maxItems"] = most
    return Constraint(kind="json_schema", text=json.dumps(schema, ensure_ascii=False))


def _moved(schema: Any, root: str) -> Any:  # noqa: ANN401 - any JSON
    """Returns a schema whose references to its own root point at `root`."""
    if isinstance(schema, list):
        return [_moved(item, root) for item in schema]
    if not isinstance(schema, dict):
        return schema
    moved: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and value.startswith("#"):
            moved[key] = root + value[1:]
        else:
            moved[key] = value if key in _DATA else _moved(value, root)
    return moved
