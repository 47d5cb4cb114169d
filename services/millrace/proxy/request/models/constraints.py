"""The fields of a body that constrain the answer to a grammar, and how they are read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Final, Required

from pydantic import Field, with_config
from typing_extensions import TypedDict

from millrace.core.request_spec import Constraint
from millrace.proxy.errors import bad_field
from millrace.proxy.request.models.fields import (
    STRICT,
    AnyObject,
    Ignored,
    OneOf,
    OneType,
    Unsupported,
    text_or_object,
)

_JsonOrText = Annotated[
    Any,
    OneType(
        text_or_object,
        "a string or an object",
        text=Annotated[str, Field(min_length=1)],
        object=AnyObject,
    ),
]
_Choices = Annotated[list[str], Field(min_length=1, max_length=4096, fail_fast=True)]


@with_config(STRICT)
class JsonSchemaFormat(TypedDict, total=False):
    """A named JSON schema of the answer."""

    name: Required[Annotated[str, Field(min_length=1, max_length=64)]]
    schema: Required[AnyObject]
    description: Ignored[str]
    strict: Ignored[bool]


@with_config(STRICT)
class ResponseFormat(TypedDict, total=False):
    """The form of an answer."""

    type: Required[Annotated[str, OneOf("text", "json_object", "json_schema")]]
    json_schema: JsonSchemaFormat | None


@with_config(STRICT)
class StructuredOutputs(TypedDict, total=False):
    """vLLM's field: one of json, regex, choice, grammar, json_object and structural_tag."""

    json: Annotated[_JsonOrText | None, Field(description="A JSON schema.")]
    regex: Annotated[str, Field(min_length=1)] | None
    choice: _Choices | None
    grammar: Annotated[
        Annotated[str, Field(min_length=1)] | None, Field(description="Lark's notation, or GBNF.")
    ]
    json_object: bool | None
    structural_tag: Annotated[
        _JsonOrText | None, Field(description="An object with structures and triggers.")
    ]
    disable_any_whitespace: Annotated[
        bool | None, Field(description="JSON without white space between its tokens.")
    ]
    whitespace_pattern: Annotated[
        Annotated[str, Field(max_length=256)] | None,
        Field(description="Regular expression of the white space between JSON's tokens."),
    ]
    disable_additional_properties: Annotated[Any, Unsupported(False)]


class ConstraintFields(TypedDict, total=False):
    """The fields of both completion endpoints that constrain the answer."""

    response_format: Annotated[
        ResponseFormat | None, Field(description="JSON, or JSON of a schema.")
    ]
    structured_outputs: Annotated[
        StructuredOutputs | None, Field(description="A grammar that the answer follows.")
    ]
    guided_json: Annotated[_JsonOrText | None, Field(description="structured_outputs.json")]
    guided_regex: Annotated[
        Annotated[str, Field(min_length=1)] | None, Field(description="structured_outputs.regex")
    ]
    guided_choice: Annotated[_Choices | None, Field(description="structured_outputs.choice")]
    guided_grammar: Annotated[
        Annotated[str, Field(min_length=1)] | None, Field(description="structured_outputs.grammar")
    ]
    guided_whitespace_pattern: Annotated[
        Annotated[str, Field(max_length=256)] | None,
        Field(description="structured_outputs.whitespace_pattern"),
    ]
    json_schema: Annotated[
        _JsonOrText | None, Field(description="SGLang's name of structured_outputs.json.")
    ]
    regex: Annotated[
        Annotated[str, Field(min_length=1)] | None,
        Field(description="SGLang's name of structured_outputs.regex."),
    ]
    ebnf: Annotated[
        Annotated[str, Field(min_length=1)] | None,
        Field(description="SGLang's name of structured_outputs.grammar."),
    ]


_KINDS: Final = {
    "json": "json_schema",
    "regex": "regex",
    "choice": "choice",
    "grammar": "grammar",
    "json_object": "json_object",
    "structural_tag": "structural_tag",
}
#: vLLM's older names and SGLang's names of fields of structured_outputs.
_NAMES: Final = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}


def read_constraint(checked: Mapping[str, Any]) -> tuple[str, Constraint | None]:
    """Returns the field of a checked body that constrains the answer, and its constraint.

    Raises ApiError naming the fields if there are several.
    """
    found = [*_of_format(checked), *_of_structured(checked), *_of_names(checked)]
    if not found:
        return "", None
    if len(found) > 1:
        names = ", ".join(name for name, _, _ in found)
        raise bad_field(found[1][0], f"only one of {names} may be given.")
    field, kind, value = found[0]
    return field, Constraint(kind=kind, text=_text(field, kind, value, _white_space(checked)))


def _of_format(checked: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    given = checked.get("response_format", {})
    kind, schema = given.get("type", "text"), given.get("json_schema")
    if kind == "json_schema" and schema is None:
        raise bad_field("response_format.json_schema", "is required with this type.")
    if kind != "json_schema" and schema is not None:
        raise bad_field("response_format.json_schema", "is only allowed with type 'json_schema'.")
    if kind == "json_schema":
        return [("response_format.json_schema.schema", "json_schema", schema["schema"])]
    return [("response_format", "json_object", True)] if kind == "json_object" else []


def _of_structured(checked: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    given = checked.get("structured_outputs")
    if not given:
        return []
    found = [
        (f"structured_outputs.{name}", kind, given[name])
        for name, kind in _KINDS.items()
        if given.get(name) not in (None, False)
    ]
    if not found:
        raise bad_field("structured_outputs", f"needs one of {', '.join(_KINDS)}.")
    return found


def _of_names(checked: Mapping[str, Any]) -> list[tuple[str, str, Any]]:
    return [
        (name, _KINDS[meant], checked[name])
        for name, meant in _NAMES.items()
        if checked.get(name) is not None
    ]


def _white_space(checked: Mapping[str, Any]) -> dict[str, Any]:
    """Returns llguidance's options of JSON (`x-guidance`)."""
    given = checked.get("structured_outputs", {})
    if given.get("disable_any_whitespace"):
        return {"whitespace_flexible": False, "whitespace_pattern": None}
    pattern = given.get("whitespace_pattern", checked.get("guided_whitespace_pattern"))
    return {} if pattern is None else {"whitespace_pattern": pattern}


def _text(field: str, kind: str, value: Any, white_space: dict[str, Any]) -> str:  # noqa: ANN401
    if kind == "json_object":
        return json.dumps(white_space) if white_space else ""
    if kind == "json_schema":
        schema = _parsed(field, value)
        if white_space:
            schema = schema | {"x-guidance": schema.get("x-guidance", {}) | white_space}
        return json.dumps(schema, ensure_ascii=False)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _parsed(field: str, value: str | dict[str, Any]) -> dict[str, Any]:
    if isinstance(value, dict):
        return value
    try:
        found = json.loads(value)
    except (ValueError, RecursionError) as error:
        raise bad_field(field, f"is no JSON: {error}.") from error
    if not isinstance(found, dict):
        raise bad_field(field, "must hold a JSON object.")
    return found
