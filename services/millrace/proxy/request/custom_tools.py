"""Shows custom tools to a chat template, which knows only functions: the input is one argument."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from millrace.core.request_spec import Constraint
from millrace.proxy.parsing.custom_input import INPUT

Json = dict[str, Any]

_SYNTAXES = {"lark": "grammar in Lark's notation", "regex": "regular expression"}
_KINDS = {"lark": "grammar", "regex": "regex"}


def as_function(custom: Mapping[str, Any]) -> Json:
    """Returns a custom tool as a function. Its grammar is told in words."""
    text = {"type": "string"}
    if grammar := _grammar(custom):
        told = f"Text that follows this {_SYNTAXES[grammar['syntax']]}:"
        text["description"] = f"{told}\n{grammar['definition']}"
    parameters = {
        "type": "object",
        "properties": {INPUT: text},
        "required": [INPUT],
        "additionalProperties": False,
    }
    shown = {name: custom[name] for name in ("name", "description") if name in custom}
    return {**shown, "parameters": parameters}


def input_constraint(custom: Mapping[str, Any]) -> Constraint | None:
    """Returns the constraint of a tool's input; None: any text."""
    if not (grammar := _grammar(custom)):
        return None
    return Constraint(kind=_KINDS[grammar["syntax"]], text=grammar["definition"])


def as_function_call(call: Mapping[str, Any]) -> Json:
    """Returns a call of the history as a function's call."""
    if "custom" not in call:
        return dict(call)
    custom = call["custom"]
    arguments = json.dumps({INPUT: custom["input"]}, ensure_ascii=False)
    found = {"type": "function", "function": {"name": custom["name"], "arguments": arguments}}
    return {**found, "id": call["id"]} if "id" in call else found


def _grammar(custom: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Mapping[str, Any] = (custom.get("format") or {}).get("grammar", {})
    return found
