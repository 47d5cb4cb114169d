"""Reads the tools of a chat: functions, the choice between them, and calls in the history."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Required

from pydantic import AfterValidator, Field, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from millrace.core.request_spec import Constraint
from millrace.proxy.errors import ApiError, bad_field, shown
from millrace.proxy.request.forced_calls import forced_calls
from millrace.proxy.request.models.fields import (
    STRICT,
    AnyObject,
    OneOf,
    OneType,
    of_types,
    text_or_object,
)

#: Clients of Anthropic's API use up to 128 characters, OpenAI's 64.
_FUNCTION_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")
#: Mistral's templates accept only ids of 9 letters and digits.
_LEGACY_ID = "call{:05d}"


def _check_name(name: str) -> str:
    if not _FUNCTION_NAME.fullmatch(name):
        message = f"must be 1 to 128 letters, digits, '_' or '-', got {shown(name)}."
        raise PydanticCustomError("invalid_value", message)
    return name


def _check_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        message = f"must be a JSON schema of type 'object', got {shown(schema['type'])}."
        raise PydanticCustomError("invalid_value", message)
    return schema


FunctionName = Annotated[
    str,
    AfterValidator(_check_name),
    Field(json_schema_extra={"pattern": "^[a-zA-Z0-9_-]{1,128}$"}),
]


#: The JSON schema of a function's arguments.
Parameters = Annotated[AnyObject, AfterValidator(_check_parameters)]


@with_config(STRICT)
class FunctionTool(TypedDict, total=False):
    """A function that the assistant may call."""

    name: Required[FunctionName]
    description: str | None
    parameters: Annotated[
        Parameters | None,
        Field(description="A JSON schema of type object. Absent: no parameters."),
    ]
    strict: Annotated[
        bool | None, Field(description="Holds if a call is forced; no effect if not.")
    ]


@with_config(STRICT)
class ResponseTool(FunctionTool, total=False):
    """A function that the assistant may call, in the form of /v1/responses."""

    type: Required[Annotated[str, OneOf("function")]]


@with_config(STRICT)
class Tool(TypedDict):
    """A tool that the assistant may call."""

    type: Annotated[str, OneOf("function")]
    function: FunctionTool


@with_config(STRICT)
class NamedFunction(TypedDict):
    """The name of a function."""

    name: FunctionName


@with_config(STRICT)
class NamedTool(TypedDict):
    """The choice of one function."""

    type: Annotated[str, OneOf("function")]
    function: NamedFunction


@with_config(STRICT)
class NamedResponseTool(TypedDict):
    """The choice of one function, in the form of /v1/responses."""

    type: Annotated[str, OneOf("function")]
    name: FunctionName


_Mode = Annotated[
    str, OneOf("auto", "required"), Field(description="required: the answer is a call.")
]


@with_config(STRICT)
class AllowedTools(TypedDict):
    """The tools that the assistant may call. Only their names are read."""

    mode: _Mode
    tools: Annotated[list[Tool], Field(min_length=1, max_length=1024, fail_fast=True)]


@with_config(STRICT)
class AllowedChoice(TypedDict):
    """The choice of some tools. The prompt shows all tools, so its cached prefix stays valid."""

    type: Annotated[str, OneOf("allowed_tools")]
    allowed_tools: AllowedTools


@with_config(STRICT)
class AllowedResponseChoice(TypedDict):
    """The choice of some tools, in the form of /v1/responses."""

    type: Annotated[str, OneOf("allowed_tools")]
    mode: _Mode
    tools: Annotated[list[ResponseTool], Field(min_length=1, max_length=1024, fail_fast=True)]


def _kind(value: object) -> str | None:
    return str(value.get("type", "function")) if isinstance(value, dict) else None


def _choice(chosen: object, *words: str) -> OneType:
    """A field that holds one of `words`, or an object of the type `chosen`."""
    return OneType(
        text_or_object,
        "a string or an object",
        text=Annotated[str, OneOf(*words)],
        object=chosen,
    )


def _one_of_types(what: str, **types: object) -> object:
    """A field that holds an object of one of `types`, by its field `type`."""
    return Annotated[
        Any,
        OneType(_kind, "an object", tagged_by="type", **types),
        of_types(tuple(types), what, "function", code="invalid_value"),
    ]


_CHOICE = "the type of a choice"
_Chosen = _one_of_types(_CHOICE, function=NamedTool, allowed_tools=AllowedChoice)
_ChosenOfResponse = _one_of_types(
    _CHOICE, function=NamedResponseTool, allowed_tools=AllowedResponseChoice
)
Choice = Annotated[Any, _choice(_Chosen, "auto", "none", "required")]
ResponseChoice = Annotated[Any, _choice(_ChosenOfResponse, "auto", "none", "required")]
LegacyChoice = Annotated[Any, _choice(NamedFunction, "auto", "none")]
#: The description of the field `tool_choice`.
CHOICES = "'auto', 'none', 'required', one function, or the tools that are allowed."
Tools = Annotated[list[Tool], Field(max_length=1024, fail_fast=True)]
ResponseTools = Annotated[list[ResponseTool], Field(max_length=1024, fail_fast=True)]
LegacyFunctions = Annotated[list[FunctionTool], Field(max_length=1024, fail_fast=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """The functions that the assistant may call. `documents`: the tools, for the chat template."""

    documents: Sequence[Mapping[str, Any]]
    schemas: Mapping[str, Any]
    parallel: bool = True
    legacy: bool = False
    #: Constrains the answer to calls; None: the model chooses.
    constraint: Constraint | None = None
    #: The functions whose calls are shown; None: all.
    allowed: frozenset[str] | None = None

    @property
    def choice_field(self) -> str:
        """The name of the field that chooses."""
        return "function_call" if self.legacy else "tool_choice"

    @property
    def field(self) -> str:
        """The name of the field that the client used."""
        return "functions" if self.legacy else "tools"


def read_tools(checked: Mapping[str, Any]) -> ToolOptions | None:
    """Returns the offered functions; None without functions or with the choice "none".

    Raises ApiError naming the field.
    """
    legacy = bool(checked.get("functions"))
    if legacy and checked.get("tools"):
        raise bad_field("functions", "can't go together with 'tools'.")
    field, choice_field = ("functions", "function_call") if legacy else ("tools", "tool_choice")
    functions = checked.get("functions") or [tool["function"] for tool in checked.get("tools", ())]
    names = [function["name"] for function in functions]
    choice = checked.get(choice_field, "auto" if functions else "none")
    if choice == "none":
        return None
    chosen = _read_choice(choice, choice_field, names)
    if not functions:
        return None
    schemas = {function["name"]: function.get("parameters") or {} for function in functions}
    _check_functions(functions, field, legacy=legacy)
    parallel = not legacy and checked.get("parallel_tool_calls", True)
    constraint = None
    if chosen.forced:
        offered = {name: schemas[name] for name in chosen.names}
        constraint = forced_calls(offered, most=None if parallel and chosen.several else 1)
    return ToolOptions(
        documents=[{"type": "function", "function": _without_nulls(f)} for f in functions],
        schemas=schemas,
        parallel=parallel,
        legacy=legacy,
        constraint=constraint,
        allowed=frozenset(chosen.names) if chosen.names != names else None,
    )


class _ReadChoice(NamedTuple):
    """The functions that the answer may call; whether it must, and whether more than once."""

    names: Sequence[str]
    forced: bool
    several: bool = True


def _read_choice(choice: Any, field: str, names: Sequence[str]) -> _ReadChoice:  # noqa: ANN401
    if choice == "auto":
        return _ReadChoice(names, forced=False)
    if not names:
        raise bad_field(field, "is only allowed together with functions to choose from.")
    if choice == "required":
        return _ReadChoice(names, forced=True)
    if (allowed := choice.get("allowed_tools")) is not None:
        path = f"{field}.allowed_tools.tools"
        found = [_named(t, f"{path}[{i}]", names) for i, t in enumerate(allowed["tools"])]
        return _ReadChoice(list(dict.fromkeys(found)), forced=allowed["mode"] == "required")
    return _ReadChoice([_named(choice, field, names)], forced=True, several=False)


def _named(tool: Mapping[str, Any], path: str, names: Sequence[str]) -> str:
    """Returns the name of a chosen tool. Raises ApiError unless it is one of `names`."""
    if "function" in tool:
        tool, path = tool["function"], f"{path}.function"
    name: str = tool["name"]
    if name not in names:
        raise bad_field(f"{path}.name", f"names no function of this request: {shown(name)}.")
    return name


def _check_functions(functions: Sequence[Mapping[str, Any]], field: str, *, legacy: bool) -> None:
    seen: set[str] = set()
    for i, function in enumerate(functions):
        path = f"{field}[{i}]" if legacy else f"{field}[{i}].function"
        if function["name"] in seen:
            raise bad_field(f"{path}.name", f"is there twice: {shown(function['name'])}.")
        seen.add(function["name"])


def _without_nulls(function: Mapping[str, Any]) -> dict[str, Any]:
    shown_fields = {k: v for k, v in function.items() if v is not None and k != "strict"}
    shown_fields.setdefault("parameters", {"type": "object", "properties": {}})
    return shown_fields


def read_history(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with legacy calls as tool calls, which chat templates know.

    Raises ApiError if a tool message answers no call of an earlier message.
    """
    read: list[dict[str, Any]] = []
    called: set[str | None] = set()
    legacy = 0
    for i, message in enumerate(messages):
        if "function_call" in message:
            legacy += 1
            message = _modern_call(message, _LEGACY_ID.format(legacy))
        elif message["role"] == "function":
            message = {**message, "role": "tool", "tool_call_id": _LEGACY_ID.format(legacy)}
        elif message["role"] == "tool" and message["tool_call_id"] not in called:
            raise _answers_nothing(i, message["tool_call_id"])
        called |= {call.get("id") for call in message.get("tool_calls", ())}
        read.append(message)
    return read


def _modern_call(message: Mapping[str, Any], call_id: str) -> dict[str, Any]:
    modern = {name: value for name, value in message.items() if name != "function_call"}
    call = {"id": call_id, "type": "function", "function": message["function_call"]}
    return {**modern, "tool_calls": [*modern.get("tool_calls", ()), call]}


def _answers_nothing(position: int, call_id: str) -> ApiError:
    path = f"messages[{position}].tool_call_id"
    return bad_field(path, f"answers no tool call of an earlier message: {shown(call_id)}.")
