"""Reads the bodies of /v1/messages, and writes them as the body of a chat completion.

Both APIs have one generation path, as /v1/responses has: errors get the names of /v1/messages back.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from millrace.proxy.errors import bad_field, shown
from millrace.proxy.request.models.sampling import SamplingFields
from millrace.proxy.request.reading import write_body
from millrace.proxy.request.renaming import FieldNames
from millrace.proxy.request.validation import Bodies, ChatRequest

Json = dict[str, Any]

#: What clients of messages call the fields of a chat's body.
MESSAGE_NAMES = FieldNames(
    {
        "max_reasoning_tokens": "thinking.budget_tokens",
        "reasoning_effort": "output_config.effort",
        "response_format.json_schema": "output_config.format",
        "tool_choice.function": "tool_choice",
    }
)
#: Fields that have the same name and meaning in both APIs.
_SAME = [
    *SamplingFields.__annotations__,
    *("model", "max_tokens", "logit_bias", "stream", "structured_outputs"),
]
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
#: Begins the result of a call that failed.
ERROR_MARK = "Error: "
#: The roles whose messages may have a block.
_ROLES = {
    "thinking": "assistant",
    "redacted_thinking": "assistant",
    "tool_use": "assistant",
    "tool_result": "user",
}
#: What the templates of Qwen, GLM and others, and those of DeepSeek and Granite, call it.
_SWITCHES = ("enable_thinking", "thinking")


def read_as_chat(bodies: Bodies, fields: Mapping[str, Any], *, reasons: bool) -> ChatRequest:
    """Returns checked fields of a message, or of a count of tokens, as a chat.

    `reasons`: the model's form of reasoning is known; a budget has no effect on other models.
    Raises ApiError naming the field.
    """
    chat = {name: fields[name] for name in _SAME if name in fields}
    if "stop_sequences" in fields:
        if "stop" in fields:
            raise bad_field("stop", "can't go together with 'stop_sequences'.")
        chat["stop"] = fields["stop_sequences"]
    chat["messages"] = messages = _messages(fields)
    if messages[-1]["role"] == "assistant":
        chat["continue_final_message"] = True
    chat |= _tools(fields) | _thinking(fields, reasons=reasons)
    config = fields.get("output_config", {})
    if effort := config.get("effort"):
        chat["reasoning_effort"] = effort
    if form := config.get("format"):
        schema = {"name": "answer", "schema": form["schema"]}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    with MESSAGE_NAMES.used():
        return bodies.read_chat(write_body(chat))


def _thinking(fields: Mapping[str, Any], *, reasons: bool) -> Json:
    """Returns the fields of a chat that say how the model reasons."""
    arguments = fields.get("chat_template_kwargs", {})
    given = fields.get("thinking")
    if given is None:
        return {"chat_template_kwargs": arguments} if arguments else {}
    kind, budget = given["type"], given.get("budget_tokens")
    if (budget is not None) != (kind == "enabled"):
        wrong = "is required with type 'enabled', and only allowed there."
        raise bad_field("thinking.budget_tokens", wrong)
    on = kind != "disabled"
    found: Json = {
        "chat_template_kwargs": {**dict.fromkeys(_SWITCHES, on), **arguments},
        "include_reasoning": on and given.get("display") != "omitted",
    }
    most = fields.get("max_tokens")
    if budget is not None and most is not None:
        if budget >= most:
            wrong = f"must be less than 'max_tokens' ({most}), got {budget}."
            raise bad_field("thinking.budget_tokens", wrong)
        if reasons:
            found["max_reasoning_tokens"] = budget
    return found


def _tools(fields: Mapping[str, Any]) -> Json:
    """Returns the tools and the choice between them as a chat's."""
    found: Json = {}
    if tools := fields.get("tools"):
        functions = [
            {name: tool[name] for name in ("name", "description", "strict") if name in tool}
            | {"parameters": tool["input_schema"]}
            for tool in tools
        ]
        found["tools"] = [{"type": "function", "function": each} for each in functions]
    if (choice := fields.get("tool_choice")) is None:
        return found
    kind, name = choice["type"], choice.get("name")
    if (name is not None) != (kind == "tool"):
        raise bad_field("tool_choice.name", "is required with type 'tool', and only allowed there.")
    named = {"type": "function", "function": {"name": name}}
    found["tool_choice"] = named if kind == "tool" else _CHOICES[kind]
    found["parallel_tool_calls"] = not choice.get("disable_parallel_tool_use")
    return found


def _messages(fields: Mapping[str, Any]) -> list[Json]:
    """Returns the conversation as messages of a chat. Messages of one role in a row are one."""
    found: list[Json] = []
    called: set[str] = set()
    if system := fields.get("system"):
        _turn(found, "system")["content"] += _parts(system)
    for i, message in enumerate(fields["messages"]):
        role, content = message["role"], message["content"]
        blocks = _parts(content) if isinstance(content, str) else content
        for j, block in enumerate(blocks):
            path = f"messages[{i}].content[{j}]"
            _check_block(block, role, called, path)
            _add_block(found, block, role)
        if not blocks:
            _turn(found, role)
    if "tool_calls" in found[-1]:
        raise bad_field(f"messages[{i}].content", "calls a tool whose result is missing.")
    for message in found:
        message["content"] = message["content"] or ""
    return found


def _check_block(block: Json, role: str, called: set[str], path: str) -> None:
    """Raises ApiError for a block of another role, and a result that answers no call in `called`.

    Adds a call to `called`.
    """
    kind = block["type"]
    if (of_role := _ROLES.get(kind, role)) != role:
        wrong = f"a block {kind!r} needs the role {of_role!r}, got {role!r}."
        raise bad_field(f"{path}.type", wrong)
    if kind == "tool_use":
        called.add(block["id"])
    elif kind == "tool_result" and block["tool_use_id"] not in called:
        wrong = f"answers no call of an earlier message: {shown(block['tool_use_id'])}."
        raise bad_field(f"{path}.tool_use_id", wrong)


def _add_block(found: list[Json], block: Json, role: str) -> None:
    kind = block["type"]
    if kind == "tool_result":
        content = _parts(block.get("content") or "")
        if block.get("is_error"):
            content = _as_error(content)
        result = {"role": "tool", "tool_call_id": block["tool_use_id"], "content": content or ""}
        found.append(result)
        return
    turn = _turn(found, role)
    if kind == "text":
        turn["content"].append({"type": "text", "text": block["text"]})
    elif kind == "thinking":
        turn["reasoning_content"] = turn.get("reasoning_content", "") + block["thinking"]
    elif kind == "tool_use":
        function = {"name": block["name"], "arguments": json.dumps(block["input"])}
        call = {"id": block["id"], "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)


def _as_error(content: list[Json]) -> list[Json]:
    """Returns the result of a call that failed, which its text says: templates have no field for
    it.
    """
    first, *others = content or [{"type": "text", "text": "The call failed."}]
    return [{**first, "text": ERROR_MARK + first["text"]}, *others]


def _turn(found: list[Json], role: str) -> Json:
    """Returns the last message if it has the role, or else a new message."""
    if not (found and found[-1]["role"] == role):
        found.append({"role": role, "content": []})
    return found[-1]


def _parts(content: str | Sequence[Json]) -> list[Json]:
    """Returns texts as parts of a chat's content; none for no text."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    return [{"type": "text", "text": block["text"]} for block in content]
