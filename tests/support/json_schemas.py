"""JSON schemas with bounded answers, of the keywords that clients use."""

from __future__ import annotations

import json
import random
from typing import Any


def schemas(seed: int, count: int) -> list[dict[str, Any]]:
    """Returns so many schemas; the same seed gives the same."""
    made, found = Schemas(seed), []
    while len(found) < count:
        schema = made.one()
        if "$ref" not in json.dumps(schema) or "$defs" in schema:  # references point at the root
            found.append(schema)
    return found


class Schemas:
    """Makes schemas with bounded answers."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def one(self, depth: int = 3) -> dict[str, Any]:
        simple = [self.integer, self.number, self.text, self.enum, self.boolean, self.pattern]
        nested = [self.object, self.array, self.either, self.reference, self.tuple, self.both]
        make = self._random.choice(simple + nested * 2 if depth else simple)
        return make(depth - 1)

    def integer(self, depth: int) -> dict[str, Any]:
        low = self._random.randint(-2000, 2000)
        return {"type": "integer", "minimum": low, "maximum": low + self._random.randint(0, 5000)}

    def number(self, depth: int) -> dict[str, Any]:
        low = self._random.randint(-50, 50)
        if self._random.random() < 0.2:
            return {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 9999}
        return {"type": "number", "minimum": low, "exclusiveMaximum": low + 10}

    def text(self, depth: int) -> dict[str, Any]:
        low = self._random.randint(0, 4)
        return {"type": "string", "minLength": low, "maxLength": low + self._random.randint(0, 9)}

    def enum(self, depth: int) -> dict[str, Any]:
        if self._random.random() < 0.2:
            return {"const": {"k": [1, None, "x"]}}
        values = ["red", 'a "quote"', "é😀", 3, -1.5, None, True, ["x", 1], {"k": "v"}, "\n\\"]
        return {"enum": self._random.sample(values, self._random.randint(1, 4))}

    def boolean(self, depth: int) -> dict[str, Any]:
        return {"type": self._random.choice(["boolean", "null", ["boolean", "null"]])}

    def pattern(self, depth: int) -> dict[str, Any]:
        patterns = ["^[A-Z]{2}[0-9]{4}$", "^(foo|bar)-[a-f]{1,8}$", r"^\d{3}\.\w{2}$"]
        formats = ["time", "uuid", "ipv4", "ipv6"]  # jsonschema knows no date of the year 0
        if self._random.random() < 0.3:
            return {"type": "string", "format": self._random.choice(formats)}
        return {"type": "string", "pattern": self._random.choice(patterns)}

    def object(self, depth: int) -> dict[str, Any]:
        names = [f"key {i}" for i in range(self._random.randint(1, 4))]
        return {
            "type": "object",
            "properties": {name: self.one(depth) for name in names},
            "required": self._random.sample(names, self._random.randint(0, len(names))),
            "additionalProperties": False,
        }

    def array(self, depth: int) -> dict[str, Any]:
        low = self._random.randint(0, 2)
        return {"type": "array", "items": self.one(0), "minItems": low, "maxItems": low + 2}

    def either(self, depth: int) -> dict[str, Any]:
        return {"anyOf": [self.one(depth), self.one(0)]}

    def reference(self, depth: int) -> dict[str, Any]:
        return {
            "$defs": {"part": self.one(0)},
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/part"}, "b": {"$ref": "#/$defs/part"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        }

    def tuple(self, depth: int) -> dict[str, Any]:
        items = [self.one(0), self.one(0)]
        return {"type": "array", "prefixItems": items, "items": False, "minItems": len(items)}

    def both(self, depth: int) -> dict[str, Any]:
        part = {"type": "object", "properties": {"a": self.one(0)}, "required": ["a"]}
        more = {"properties": {"a": True, "b": self.one(0)}, "additionalProperties": False}
        return {"allOf": [part, more], "type": "object"}
