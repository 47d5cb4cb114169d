"""The models of custom tools, whose input is free text."""

from __future__ import annotations

import re
from typing import Annotated, Any, Required

from pydantic import AfterValidator, Field, with_config
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from millrace.proxy.errors import shown
from millrace.proxy.request.models.fields import STRICT, OneOf, one_of_types

#: Clients of Anthropic's API use up to 128 characters, OpenAI's 64.
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,128}")


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name):
        message = f"must be 1 to 128 letters, digits, '_' or '-', got {shown(name)}."
        raise PydanticCustomError("invalid_value", message)
    return name


#: The name of a tool.
ToolName = Annotated[
    str,
    AfterValidator(_check_name),
    Field(json_schema_extra={"pattern": "^[a-zA-Z0-9_-]{1,128}$"}),
]
_Type = Annotated[str, OneOf("custom")]
_Syntax = Annotated[str, OneOf("lark", "regex")]
_Definition = Annotated[str, Field(min_length=1)]


@with_config(STRICT)
class FreeText(TypedDict):
    """Any text."""

    type: Annotated[str, OneOf("text")]


@with_config(STRICT)
class Grammar(TypedDict):
    """A grammar in Lark's notation, or a regular expression."""

    syntax: _Syntax
    definition: _Definition


@with_config(STRICT)
class GrammarText(TypedDict):
    """A text that follows a grammar. It holds if a call is forced; no effect if not."""

    type: Annotated[str, OneOf("grammar")]
    grammar: Grammar


@with_config(STRICT)
class FlatGrammarText(TypedDict):
    """A text that follows a grammar, in the form of /v1/responses."""

    type: Annotated[str, OneOf("grammar")]
    syntax: _Syntax
    definition: _Definition


_FORMAT = "the type of a format"
_Format: Any = one_of_types(_FORMAT, text=FreeText, grammar=GrammarText)
_FlatFormat: Any = one_of_types(_FORMAT, text=FreeText, grammar=FlatGrammarText)


@with_config(STRICT)
class Custom(TypedDict, total=False):
    """A tool whose input is free text."""

    name: Required[ToolName]
    description: str | None
    format: _Format | None


@with_config(STRICT)
class CustomTool(TypedDict):
    """A custom tool that the assistant may call."""

    type: _Type
    custom: Custom


@with_config(STRICT)
class CustomResponseTool(TypedDict, total=False):
    """A custom tool that the assistant may call, in the form of /v1/responses."""

    type: Required[_Type]
    name: Required[ToolName]
    description: str | None
    format: _FlatFormat | None


@with_config(STRICT)
class CustomName(TypedDict):
    """The name of a custom tool."""

    name: ToolName


@with_config(STRICT)
class NamedCustomTool(TypedDict):
    """The choice of one custom tool."""

    type: _Type
    custom: CustomName


@with_config(STRICT)
class NamedCustomResponseTool(TypedDict):
    """The choice of one custom tool, in the form of /v1/responses."""

    type: _Type
    name: ToolName
