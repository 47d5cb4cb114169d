"""Checks chat messages: roles, contents, and the shape that chat templates read."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.proxy.errors import bad_field, shown
from millrace.proxy.request.fields import (
    Ignored,
    Integer,
    Json,
    Kind,
    ListOf,
    Object,
    Schema,
    String,
    Unsupported,
    check_fields,
    object_schema,
    wrong_type,
)
from millrace.proxy.request.free_form import AnyObject, JsonText

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_TOOL_CALL = Object(
    {
        "id": String(),
        "type": String(),
        "index": Ignored(Integer(0, 2**31 - 1)),
        "function": Object({"name": String(), "arguments": JsonText()}, ("name", "arguments")),
    },
    ("function",),
)


#: A field that clients of Anthropic's API put into a content part: Millrace caches prefixes
#: without such marks.
_PART_EXTRAS: dict[str, Kind] = {"cache_control": Ignored(AnyObject())}


@dataclass(frozen=True, slots=True)
class Content:
    """A message's content: a string, or an array of parts of type text, joined by line breaks."""

    def check(self, value: Json, path: str) -> str:
        if isinstance(value, str):
            return value
        if not isinstance(value, list):
            raise wrong_type(path, "a string or an array of content parts", value)
        if not value:
            raise bad_field(path, "must not be empty.", "empty_array")
        return "\n".join([_part(part, f"{path}[{i}]") for i, part in enumerate(value)])

    def schema(self) -> Schema:
        fields: dict[str, Kind] = {"type": _TextType(), "text": String(), **_PART_EXTRAS}
        part = object_schema(fields, ("type", "text"))
        return {"anyOf": [{"type": "string"}, {"type": "array", "minItems": 1, "items": part}]}


@dataclass(frozen=True, slots=True)
class _TextType:
    def check(self, value: Json, path: str) -> str:
        if value not in ("text", "input_text", "refusal"):
            raise bad_field(
                path,
                f"only content parts of type 'text' are supported, got {shown(value)}.",
                "unsupported_content_type",
            )
        return str(value)

    def schema(self) -> Schema:
        return {"const": "text"}


def _part(part: Json, path: str) -> str:
    if not isinstance(part, dict):
        raise wrong_type(path, "a content part", part)
    kind = _TextType().check(part.get("type"), f"{path}.type")
    name = "refusal" if kind == "refusal" else "text"
    fields: dict[str, Kind] = {"type": _TextType(), name: String(), **_PART_EXTRAS}
    return str(check_fields(part, fields, ("type", name), path)[name])


@dataclass(frozen=True, slots=True)
class _Role:
    def check(self, value: Json, path: str) -> str:
        if not isinstance(value, str):
            raise wrong_type(path, "a string", value)
        if value not in ROLES:
            raise bad_field(path, f"must be one of {', '.join(ROLES)}, got {shown(value)}.")
        return value

    def schema(self) -> Schema:
        return {"type": "string", "enum": list(ROLES)}


_FIELDS: dict[str, Kind] = {
    "role": _Role(),
    "content": Content(),
    "name": String(),
    "refusal": String(),
    "reasoning_content": String(),
    "reasoning": String(),
    "tool_calls": ListOf(_TOOL_CALL),
    "tool_call_id": String(),
    "function_call": AnyObject(),
    "annotations": ListOf(AnyObject()),
    "audio": Unsupported(),
}


@dataclass(frozen=True, slots=True)
class Messages:
    """A conversation of at least one message; `check` returns plain dicts for chat templates."""

    def check(self, value: Json, path: str) -> list[dict[str, Json]]:
        if not isinstance(value, list):
            raise wrong_type(path, "an array of messages", value)
        if not value:
            raise bad_field(path, "must have at least one message.", "empty_array")
        return [_message(message, f"{path}[{i}]") for i, message in enumerate(value)]

    def schema(self) -> Schema:
        plain = object_schema(_FIELDS, ("role", "content"))
        called = object_schema(_FIELDS, ("role", "tool_calls"))
        called["properties"]["role"] = {"const": "assistant"}
        called["properties"]["tool_calls"]["minItems"] = 1
        return {"type": "array", "minItems": 1, "items": {"anyOf": [plain, called]}}


def _message(message: Json, path: str) -> dict[str, Json]:
    if not isinstance(message, dict):
        raise wrong_type(path, "a message object", message)
    checked = check_fields(message, _FIELDS, ("role",), path)
    if "content" not in checked:
        calls = checked.get("tool_calls") or checked.get("function_call") or checked.get("refusal")
        if not (checked["role"] == "assistant" and calls):
            raise bad_field(f"{path}.content", "is required.", "missing_required_parameter")
        checked["content"] = ""
    return checked
