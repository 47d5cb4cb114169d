"""The models of chat messages: roles, contents, and the shape that chat templates read."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    with_config,
)
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from millrace.proxy.errors import shown
from millrace.proxy.request.models.fields import (
    STRICT,
    AnyObject,
    Ignored,
    JsonText,
    OneOf,
    OneType,
    Unsupported,
    Within,
    kind_of_part,
    text_or_array,
    wrong_field,
)

_PART_TYPES = ("text", "input_text", "refusal")


def _needs(role: str, field: str) -> dict[str, Any]:
    """Returns the JSON schema of the rule that messages of `role` have `field`."""
    return {
        "anyOf": [
            {"properties": {"role": {"not": {"const": role}}}},
            {"required": [field], "properties": {field: {"type": "string"}}},
        ]
    }


#: The fields that messages of a role need beside `content`.
_NEEDED = {"tool": "tool_call_id", "function": "name"}
#: The JSON schema of the rules that `_read_message` checks.
_RULES: dict[str, Any] = {
    "anyOf": [
        {"required": ["content"], "properties": {"content": {"not": {"type": "null"}}}},
        {
            "required": ["tool_calls"],
            "properties": {
                "role": {"const": "assistant"},
                "tool_calls": {"type": "array", "minItems": 1},
            },
        },
    ],
    "allOf": [_needs(role, field) for role, field in _NEEDED.items()],
}


def _as_sent(value: Any, check: ValidatorFunctionWrapHandler) -> dict[str, Any]:  # noqa: ANN401
    """Returns the checked fields in the client's order, without nulls: templates show both."""
    checked = check(value)
    return {name: checked[name] for name in value if checked[name] is not None}


@with_config(STRICT)
class Function(TypedDict):
    """The call of a function."""

    name: str
    arguments: JsonText


@with_config(STRICT)
class CalledCustom(TypedDict):
    """The call of a custom tool."""

    name: str
    input: str


def _call_of(kind: str, other: str, of_type: dict[str, Any]) -> dict[str, Any]:
    """Returns the JSON schema of the rule that a call of one kind has the field `kind` alone."""
    fields = {"type": of_type, kind: {"type": "object"}, other: {"type": "null"}}
    return {"required": [kind], "properties": fields}


#: The JSON schema of the rules that `_read_call` checks.
_CALL_RULES: dict[str, Any] = {
    "anyOf": [
        {"required": ["type"], "allOf": [_call_of("custom", "function", {"const": "custom"})]},
        _call_of("function", "custom", {"not": {"const": "custom"}}),
    ]
}


@with_config(ConfigDict(**STRICT, json_schema_extra=_CALL_RULES))
class ToolCall(TypedDict):
    """A tool call of the assistant."""

    id: NotRequired[str | None]
    type: NotRequired[str | None]
    index: NotRequired[Ignored[Annotated[int, Within(0, 2**31 - 1)]]]
    function: NotRequired[Annotated[Function, WrapValidator(_as_sent)] | None]
    custom: NotRequired[CalledCustom | None]


def _read_call(value: Any, check: ValidatorFunctionWrapHandler) -> dict[str, Any]:  # noqa: ANN401
    call = _as_sent(value, check)
    kind, other = ("custom", "function") if call.get("type") == "custom" else ("function", "custom")
    if other in call:
        wrong = PydanticCustomError("invalid_value", f"is not allowed in a call of a {kind} tool.")
        raise wrong_field(other, wrong, value)
    if kind not in call:
        raise wrong_field(kind, "missing", value)
    return call


def _check_type(part: object) -> object:
    if isinstance(part, dict) and part.get("type") not in _PART_TYPES:
        got = shown(part.get("type"))
        message = f"only content parts of type 'text' are supported, got {got}."
        raise wrong_field("type", PydanticCustomError("unsupported_content_type", message), part)
    return part


# Clients of Anthropic's API send `cache_control`: Millrace caches prefixes without such marks.


@with_config(STRICT)
class TextPart(TypedDict):
    """A part of a message's content."""

    type: Literal["text", "input_text"]
    text: str
    cache_control: NotRequired[Ignored[AnyObject]]


@with_config(STRICT)
class RefusalPart(TypedDict):
    """A part of an assistant's content: the model refused to answer."""

    type: Literal["refusal"]
    refusal: str
    cache_control: NotRequired[Ignored[AnyObject]]


Part = Annotated[
    Any,
    OneType(
        kind_of_part,
        "an object",
        text=TextPart,
        refusal=RefusalPart,
    ),
    BeforeValidator(_check_type),
]


def _joined(parts: list[Any]) -> str:
    return "\n".join(part["refusal" if part["type"] == "refusal" else "text"] for part in parts)


_Parts = Annotated[list[Part], Field(min_length=1, fail_fast=True), AfterValidator(_joined)]


#: A string, or parts of type text, which are joined by line breaks.
Content = Annotated[
    Any,
    text_or_array(_Parts, "content parts"),
]


@with_config(ConfigDict(**STRICT, json_schema_extra=_RULES))
class Message(TypedDict):
    """A message of a conversation."""

    role: Annotated[str, OneOf("system", "developer", "user", "assistant", "tool", "function")]
    content: NotRequired[Content | None]
    name: NotRequired[str | None]
    refusal: NotRequired[str | None]
    reasoning_content: NotRequired[str | None]
    reasoning: NotRequired[str | None]
    tool_calls: NotRequired[
        Annotated[list[Annotated[ToolCall, WrapValidator(_read_call)]], Field(fail_fast=True)]
        | None
    ]
    tool_call_id: NotRequired[str | None]
    function_call: NotRequired[Annotated[Function, WrapValidator(_as_sent)] | None]
    annotations: NotRequired[Annotated[list[AnyObject], Field(fail_fast=True)] | None]
    audio: NotRequired[Annotated[Any, Unsupported()]]


def _read_message(checked: Message) -> dict[str, Any]:
    message = {name: value for name, value in checked.items() if value is not None}
    if "content" not in message:
        calls = message.get("tool_calls") or message.get("function_call") or message.get("refusal")
        if not (message["role"] == "assistant" and calls):
            raise wrong_field("content", "missing", checked)
        message["content"] = ""
    needed = _NEEDED.get(str(message["role"]))
    if needed is not None and needed not in message:
        raise wrong_field(needed, "missing", checked)
    return message


#: A conversation, as plain dicts for chat templates.
Messages = Annotated[
    list[Annotated[Message, AfterValidator(_read_message)]], Field(min_length=1, fail_fast=True)
]
