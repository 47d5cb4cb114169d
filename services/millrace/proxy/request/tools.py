"""Reads the tools of a chat: functions, the choice between them, and calls in the history."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from millrace.core.request_spec import Constraint
from millrace.proxy.errors import ApiError, bad_field, shown
from millrace.proxy.request.custom_tools import as_function, as_function_call, input_constraint
from millrace.proxy.request.forced_calls import forced_calls

#: Mistral's templates accept only ids of 9 letters and digits.
_LEGACY_ID = "call{:05d}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolOptions:
    """The tools that the assistant may call. `documents`: as functions, for the chat template."""

    documents: Sequence[Mapping[str, Any]]
    schemas: Mapping[str, Any]
    parallel: bool = True
    legacy: bool = False
    #: Constrains the answer to calls; None: the model chooses.
    constraint: Constraint | None = None
    #: The tools whose calls are shown; None: all.
    allowed: frozenset[str] | None = None
    #: The tools whose input is free text.
    custom: frozenset[str] = frozenset()
    #: The fields with a grammar of such an input, and the grammars as constraints.
    grammars: Sequence[tuple[str, Constraint]] = ()
    #: The tool whose input is the whole answer; empty: calls have names.
    alone: str = ""

    @property
    def choice_field(self) -> str:
        """The name of the field that chooses."""
        return "function_call" if self.legacy else "tool_choice"

    @property
    def field(self) -> str:
        """The name of the field that the client used."""
        return "functions" if self.legacy else "tools"


class _Tool(NamedTuple):
    """One tool: its kind, its path in the body, and the function that a template shows for it."""

    kind: str
    path: str
    function: Mapping[str, Any]
    grammar: Constraint | None = None  # of a custom tool's input

    @property
    def name(self) -> str:
        return str(self.function["name"])

    @property
    def schema(self) -> Any:  # noqa: ANN401 - any JSON schema
        return self.function.get("parameters") or {}


def read_tools(checked: Mapping[str, Any]) -> ToolOptions | None:
    """Returns the offered tools; None without tools or with the choice "none".

    Raises ApiError naming the field.
    """
    legacy = bool(checked.get("functions"))
    if legacy and checked.get("tools"):
        raise bad_field("functions", "can't go together with 'tools'.")
    choice_field = "function_call" if legacy else "tool_choice"
    tools = _offered(checked)
    choice = checked.get(choice_field, "auto" if tools else "none")
    if choice == "none":
        return None
    chosen = _read_choice(choice, choice_field, {tool.name: tool.kind for tool in tools})
    if not tools:
        return None
    _check_names(tools)
    parallel = not legacy and checked.get("parallel_tool_calls", True)
    offered = [tool for tool in tools if tool.name in chosen.names]
    constraint, alone = None, ""
    if chosen.forced:
        alone = _alone(offered)
        constraint = offered[0].grammar if alone else _calls(offered, chosen, parallel=parallel)
    return ToolOptions(
        documents=[{"type": "function", "function": _without_nulls(t.function)} for t in tools],
        schemas={tool.name: tool.schema for tool in tools},
        parallel=parallel,
        legacy=legacy,
        constraint=constraint,
        allowed=frozenset(chosen.names) if len(offered) < len(tools) else None,
        custom=frozenset(tool.name for tool in tools if tool.kind == "custom"),
        grammars=[(f"{t.path}.format", t.grammar) for t in tools if t.grammar is not None],
        alone=alone,
    )


def _offered(checked: Mapping[str, Any]) -> list[_Tool]:
    if functions := checked.get("functions"):
        return [_Tool("function", f"functions[{i}]", f) for i, f in enumerate(functions)]
    tools = []
    for i, tool in enumerate(checked.get("tools", ())):
        if custom := tool.get("custom"):
            path, grammar = f"tools[{i}].custom", input_constraint(custom)
            tools.append(_Tool("custom", path, as_function(custom), grammar))
        else:
            tools.append(_Tool("function", f"tools[{i}].function", tool["function"]))
    return tools


def _alone(offered: Sequence[_Tool]) -> str:
    """Returns the tool whose input must be the whole answer; empty if calls have names.

    A grammar of free text holds for no part of a JSON string: quotes are escaped there.
    """
    ruled = [tool for tool in offered if tool.grammar is not None]
    if ruled and len(offered) > 1:
        wrong = "a tool with a grammar can only be forced alone: 'tool_choice' has to name it."
        raise bad_field(f"{ruled[0].path}.format", wrong)
    return ruled[0].name if ruled else ""


def _calls(offered: Sequence[_Tool], chosen: _ReadChoice, *, parallel: bool) -> Constraint:
    schemas = {tool.name: tool.schema for tool in offered}
    return forced_calls(schemas, most=None if parallel and chosen.several else 1)


class _ReadChoice(NamedTuple):
    """The tools that the answer may call; whether it must, and whether more than once."""

    names: Collection[str]
    forced: bool
    several: bool = True


def _read_choice(choice: Any, field: str, kinds: Mapping[str, str]) -> _ReadChoice:  # noqa: ANN401
    """Returns the choice between tools whose `kinds` are known by their names."""
    if choice == "auto":
        return _ReadChoice(kinds, forced=False)
    if not kinds:
        raise bad_field(field, "is only allowed together with tools to choose from.")
    if choice == "required":
        return _ReadChoice(kinds, forced=True)
    if (allowed := choice.get("allowed_tools")) is not None:
        path = f"{field}.allowed_tools.tools"
        found = {_named(t, f"{path}[{i}]", kinds) for i, t in enumerate(allowed["tools"])}
        return _ReadChoice(found, forced=allowed["mode"] == "required")
    return _ReadChoice([_named(choice, field, kinds)], forced=True, several=False)


def _named(tool: Mapping[str, Any], path: str, kinds: Mapping[str, str]) -> str:
    """Returns the name of a chosen tool. Raises ApiError if there is no such tool."""
    kind = "custom" if "custom" in tool else "function"
    if kind in tool:
        tool, path = tool[kind], f"{path}.{kind}"
    name: str = tool["name"]
    if kinds.get(name) != kind:
        what = "custom tool" if kind == "custom" else kind
        raise bad_field(f"{path}.name", f"names no {what} of this request: {shown(name)}.")
    return name


def _check_names(tools: Sequence[_Tool]) -> None:
    seen: set[str] = set()
    for tool in tools:
        if tool.name in seen:
            raise bad_field(f"{tool.path}.name", f"is there twice: {shown(tool.name)}.")
        seen.add(tool.name)


def _without_nulls(function: Mapping[str, Any]) -> dict[str, Any]:
    shown_fields = {k: v for k, v in function.items() if v is not None and k != "strict"}
    shown_fields.setdefault("parameters", {"type": "object", "properties": {}})
    return shown_fields


def read_history(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns the messages with all calls as calls of functions, which chat templates know.

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
        if calls := message.get("tool_calls"):
            called |= {call.get("id") for call in calls}
            message = {**message, "tool_calls": [as_function_call(call) for call in calls]}
        read.append(message)
    return read


def _modern_call(message: Mapping[str, Any], call_id: str) -> dict[str, Any]:
    modern = {name: value for name, value in message.items() if name != "function_call"}
    call = {"id": call_id, "type": "function", "function": message["function_call"]}
    return {**modern, "tool_calls": [*modern.get("tool_calls", ()), call]}


def _answers_nothing(position: int, call_id: str) -> ApiError:
    path = f"messages[{position}].tool_call_id"
    return bad_field(path, f"answers no tool call of an earlier message: {shown(call_id)}.")
