"""The models of the tools of a chat, and of the choice between them."""

from __future__ import annotations

from typing import Annotated, Any, Required

from pydantic import AfterValidator, Field, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from millrace.proxy.errors import shown
from millrace.proxy.request.models.custom_tools import (
    CustomResponseTool,
    CustomTool,
    NamedCustomResponseTool,
    NamedCustomTool,
    ToolName,
)
from millrace.proxy.request.models.fields import (
    STRICT,
    AnyObject,
    OneOf,
    OneType,
    one_of_types,
    text_or_object,
)


def _check_parameters(schema: dict[str, Any]) -> dict[str, Any]:
    if schema.get("type", "object") != "object":
        message = f"must be a JSON schema of type 'object', got {shown(schema['type'])}."
        raise PydanticCustomError("invalid_value", message)
    return schema


#: The JSON schema of a function's arguments.
Parameters = Annotated[AnyObject, AfterValidator(_check_parameters)]


@with_config(STRICT)
class FunctionTool(TypedDict, total=False):
    """A function that the assistant may call."""

    name: Required[ToolName]
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
    """A function that the assistant may call."""

    type: Annotated[str, OneOf("function")]
    function: FunctionTool


@with_config(STRICT)
class NamedFunction(TypedDict):
    """The name of a function."""

    name: ToolName


@with_config(STRICT)
class NamedTool(TypedDict):
    """The choice of one function."""

    type: Annotated[str, OneOf("function")]
    function: NamedFunction


@with_config(STRICT)
class NamedResponseTool(TypedDict):
    """The choice of one function, in the form of /v1/responses."""

    type: Annotated[str, OneOf("function")]
    name: ToolName


_TOOL, _CHOICE = "the type of a tool", "the type of a choice"
_AnyTool: Any = one_of_types(_TOOL, "function", function=Tool, custom=CustomTool)
_AnyResponseTool: Any = one_of_types(
    _TOOL, "function", function=ResponseTool, custom=CustomResponseTool
)
_Mode = Annotated[
    str, OneOf("auto", "required"), Field(description="required: the answer is a call.")
]


@with_config(STRICT)
class AllowedTools(TypedDict):
    """The tools that the assistant may call. Only their names are read."""

    mode: _Mode
    tools: Annotated[list[_AnyTool], Field(min_length=1, max_length=1024, fail_fast=True)]


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
    tools: Annotated[list[_AnyResponseTool], Field(min_length=1, max_length=1024, fail_fast=True)]


def _choice(chosen: object, *words: str) -> OneType:
    """A field that holds one of `words`, or an object of the type `chosen`."""
    return OneType(
        text_or_object,
        "a string or an object",
        text=Annotated[str, OneOf(*words)],
        object=chosen,
    )


_Chosen = one_of_types(
    _CHOICE,
    "function",
    function=NamedTool,
    custom=NamedCustomTool,
    allowed_tools=AllowedChoice,
)
_ChosenOfResponse = one_of_types(
    _CHOICE,
    "function",
    function=NamedResponseTool,
    custom=NamedCustomResponseTool,
    allowed_tools=AllowedResponseChoice,
)
Choice = Annotated[Any, _choice(_Chosen, "auto", "none", "required")]
ResponseChoice = Annotated[Any, _choice(_ChosenOfResponse, "auto", "none", "required")]
LegacyChoice = Annotated[Any, _choice(NamedFunction, "auto", "none")]
#: The description of the field `tool_choice`.
CHOICES = "'auto', 'none', 'required', one tool, or the tools that are allowed."
Tools = Annotated[list[_AnyTool], Field(max_length=1024, fail_fast=True)]
ResponseTools = Annotated[list[_AnyResponseTool], Field(max_length=1024, fail_fast=True)]
LegacyFunctions = Annotated[list[FunctionTool], Field(max_length=1024, fail_fast=True)]
