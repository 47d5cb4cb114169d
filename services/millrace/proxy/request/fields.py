"""Kinds of JSON fields: each kind checks a decoded value and describes itself as JSON schema.

`check(value, path)` returns the checked value in Python's form, or raises ApiError naming `path`.
One table of fields per request body is the single source of validation and of the OpenAPI document.
A null field counts as absent, as OpenAI's clients send it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from millrace.proxy.errors import ApiError, bad_field, shown

Json = Any
Schema = dict[str, Any]

_NAMES = {
    dict: "an object",
    list: "an array",
    str: "a string",
    bool: "a boolean",
    int: "an integer",
    float: "a number",
    type(None): "null",
}


class Kind(Protocol):
    """One kind of field."""

    def check(self, value: Json, path: str) -> Json: ...

    def schema(self) -> Schema: ...


def wrong_type(path: str, wanted: str, value: Json) -> ApiError:
    got = _NAMES.get(type(value), "something else")
    return bad_field(path, f"expected {wanted}, got {got}.", "invalid_type")


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number within [low, high]; `above` excludes `low` itself."""

    low: float
    high: float
    above: bool = False
    doc: str = ""

    def check(self, value: Json, path: str) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise wrong_type(path, "a number", value)
        if not self.low <= value <= self.high or (self.above and value == self.low):
            low = f"above {self.low:g}" if self.above else f"at least {self.low:g}"
            raise bad_field(path, f"must be {low} and at most {self.high:g}, got {shown(value)}.")
        return float(value)

    def schema(self) -> Schema:
        bound = "exclusiveMinimum" if self.above else "minimum"
        return documented({"type": "number", bound: self.low, "maximum": self.high}, self.doc)


@dataclass(frozen=True, slots=True)
class Integer:
    """A whole number within [low, high]."""

    low: int
    high: int
    doc: str = ""

    def check(self, value: Json, path: str) -> int:
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise wrong_type(path, "an integer", value)
        if not self.low <= value <= self.high:
            raise bad_field(
                path, f"must be between {self.low} and {self.high}, got {shown(value)}."
            )
        return value

    def schema(self) -> Schema:
        schema = {"type": "integer", "minimum": self.low, "maximum": self.high}
        return documented(schema, self.doc)


@dataclass(frozen=True, slots=True)
class Boolean:
    doc: str = ""

    def check(self, value: Json, path: str) -> bool:
        if not isinstance(value, bool):
            raise wrong_type(path, "a boolean", value)
        return value

    def schema(self) -> Schema:
        return documented({"type": "boolean"}, self.doc)


@dataclass(frozen=True, slots=True)
class String:
    """A string of `shortest` to `longest` characters (None: no limit)."""

    shortest: int = 0
    longest: int | None = None
    doc: str = ""

    def check(self, value: Json, path: str) -> str:
        if not isinstance(value, str):
            raise wrong_type(path, "a string", value)
        if len(value) < self.shortest:
            raise bad_field(path, f"must have at least {self.shortest} characters.", "empty_string")
        if self.longest is not None and len(value) > self.longest:
            raise bad_field(path, f"must have at most {self.longest} characters.")
        return value

    def schema(self) -> Schema:
        schema: Schema = {"type": "string"}
        if self.shortest:
            schema["minLength"] = self.shortest
        if self.longest is not None:
            schema["maxLength"] = self.longest
        return documented(schema, self.doc)


@dataclass(frozen=True, slots=True)
class OneOf:
    """A string from a fixed list. `why` explains in the error why other strings are refused."""

    choices: tuple[str, ...]
    why: str = ""
    doc: str = ""

    def check(self, value: Json, path: str) -> str:
        if not isinstance(value, str):
            raise wrong_type(path, "a string", value)
        if value not in self.choices:
            wanted = ", ".join(repr(choice) for choice in self.choices)
            raise bad_field(path, f"must be one of {wanted}, got {shown(value)}.{self.why}")
        return value

    def schema(self) -> Schema:
        return documented({"type": "string", "enum": list(self.choices)}, self.doc)


@dataclass(frozen=True, slots=True)
class ListOf:
    """An array of `fewest` to `most` items of one kind."""

    item: Kind
    fewest: int = 0
    most: int | None = None
    doc: str = ""

    def check(self, value: Json, path: str) -> list[Json]:
        if not isinstance(value, list):
            raise wrong_type(path, "an array", value)
        if len(value) < self.fewest:
            raise bad_field(path, f"must have at least {self.fewest} items.", "empty_array")
        if self.most is not None and len(value) > self.most:
            raise bad_field(path, f"must have at most {self.most} items, got {len(value)}.")
        check = self.item.check
        return [check(item, f"{path}[{i}]") for i, item in enumerate(value)]

    def schema(self) -> Schema:
        schema: Schema = {"type": "array", "items": self.item.schema()}
        if self.fewest:
            schema["minItems"] = self.fewest
        if self.most is not None:
            schema["maxItems"] = self.most
        return documented(schema, self.doc)


@dataclass(frozen=True, slots=True)
class TokenIds:
    """A non-empty array of token ids below `vocab_size`, checked as a whole."""

    vocab_size: int
    fewest: int = 1
    most: int | None = None

    def check(self, value: Json, path: str) -> list[int]:
        if not isinstance(value, list):
            raise wrong_type(path, "an array of token ids", value)
        if len(value) < self.fewest:
            raise bad_field(path, "must not be empty.", "empty_array")
        if self.most is not None and len(value) > self.most:
            raise bad_field(path, f"must have at most {self.most} items, got {len(value)}.")
        if set(map(type, value)) <= {int} and (
            not value or (min(value) >= 0 and max(value) < self.vocab_size)
        ):
            return value
        kind = Integer(0, self.vocab_size - 1)
        return [kind.check(item, f"{path}[{i}]") for i, item in enumerate(value)]

    def schema(self) -> Schema:
        schema = ListOf(Integer(0, self.vocab_size - 1), self.fewest, self.most).schema()
        return schema


@dataclass(frozen=True, slots=True)
class LogitBias:
    """An object from token ids (as strings) to a bias within [-100, 100]."""

    vocab_size: int
    doc: str = ""

    def check(self, value: Json, path: str) -> dict[int, float]:
        if not isinstance(value, dict):
            raise wrong_type(path, "an object", value)
        bias = Number(-100.0, 100.0)
        checked = {}
        for key, item in value.items():
            # isdigit alone accepts digits of other scripts; 10 digits hold every possible id.
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise bad_field(path, f"keys are token ids, got {shown(key)}.")
            if int(key) >= self.vocab_size:
                raise bad_field(
                    path, f"token id {int(key)} is outside the vocabulary of {self.vocab_size}."
                )
            checked[int(key)] = bias.check(item, f"{path}.{key}")
        return checked

    def schema(self) -> Schema:
        schema: Schema = {
            "type": "object",
            "additionalProperties": Number(-100.0, 100.0).schema(),
            "propertyNames": {"pattern": "^[0-9]{1,10}$"},
        }
        return documented(schema, self.doc)


@dataclass(frozen=True, slots=True)
class Object:
    """An object with known fields; unknown fields are refused by name."""

    fields: Mapping[str, Kind]
    required: tuple[str, ...] = ()
    doc: str = ""

    def check(self, value: Json, path: str) -> dict[str, Json]:
        if not isinstance(value, dict):
            raise wrong_type(path, "an object", value)
        return check_fields(value, self.fields, self.required, path)

    def schema(self) -> Schema:
        return documented(object_schema(self.fields, self.required), self.doc)


@dataclass(frozen=True, slots=True)
class StopStrings:
    """A non-empty string or an array of up to `most` strings; `check` returns a tuple."""

    most: int
    longest: int
    doc: str = ""

    def check(self, value: Json, path: str) -> tuple[str, ...]:
        item = String(1, self.longest)
        if isinstance(value, str):
            return (item.check(value, path),)
        if not isinstance(value, list):
            raise wrong_type(path, "a string or an array of strings", value)
        return tuple(ListOf(item, 0, self.most).check(value, path))

    def schema(self) -> Schema:
        item = String(1, self.longest)
        schemas = [item.schema(), ListOf(item, 0, self.most).schema()]
        return documented({"anyOf": schemas}, self.doc)


@dataclass(frozen=True, slots=True)
class Ignored:
    """A field that is checked and has no effect, as in vLLM."""

    kind: Kind

    def check(self, value: Json, path: str) -> Json:
        return self.kind.check(value, path)

    def schema(self) -> Schema:
        return {**self.kind.schema(), "description": "Accepted and ignored."}


@dataclass(frozen=True, slots=True)
class Unsupported:
    """A field of OpenAI's API or of vLLM that Millrace does not support.

    Values in `harmless` have no effect and are accepted.
    """

    harmless: Sequence[Json] = field(default=())

    def check(self, value: Json, path: str) -> Json:
        if any(type(value) is type(asked) and value == asked for asked in self.harmless):
            return value
        message = f"is not supported by this server, got {shown(value)}."
        raise bad_field(path, message, "unsupported_parameter")

    def schema(self) -> Schema:
        return {"enum": [None, *self.harmless], "description": "Not supported."}


def check_fields(
    body: Mapping[str, Json], fields: Mapping[str, Kind], required: Sequence[str], path: str = ""
) -> dict[str, Json]:
    """Checks every field of an object by the table; returns the fields that are not null.

    Raises ApiError for an unknown, a wrong or a missing field.
    """
    checked: dict[str, Json] = {}
    for name, value in body.items():
        kind = fields.get(name)
        full = f"{path}.{name}" if path else name
        if kind is None:
            full = full if len(full) <= 200 else full[:200]
            raise ApiError(
                400, f"Unknown parameter: '{full}'.", param=full, code="unknown_parameter"
            )
        if value is not None:
            checked[name] = kind.check(value, full)
    for name in required:
        if name not in checked:
            full = f"{path}.{name}" if path else name
            raise ApiError(
                400,
                f"Missing required parameter: '{full}'.",
                param=full,
                code="missing_required_parameter",
            )
    return checked


def object_schema(fields: Mapping[str, Kind], required: Sequence[str] = ()) -> Schema:
    """Returns the JSON schema (OpenAPI 3.1) of an object with exactly these fields."""
    properties = {}
    for name, kind in fields.items():
        schema = kind.schema()
        properties[name] = schema if name in required else _nullable(schema)
    schema = {"type": "object", "properties": properties, "additionalProperties": False}
    if required:
        schema["required"] = list(required)
    return schema


def _nullable(schema: Schema) -> Schema:
    if "enum" in schema:
        if None in schema["enum"]:
            return schema
        kinds = {"type": [schema["type"], "null"]} if "type" in schema else {}
        return {**schema, **kinds, "enum": [*schema["enum"], None]}
    if isinstance(schema.get("type"), str):
        return {**schema, "type": [schema["type"], "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def documented(schema: Schema, doc: str) -> Schema:
    return {**schema, "description": doc} if doc else schema
