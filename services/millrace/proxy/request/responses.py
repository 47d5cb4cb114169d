"""Reads the body of /v1/responses, and writes it as the body of a chat completion.

Both APIs have one generation path: the fields of a response have the names and the checks that
/v1/chat/completions has, and errors get the names of /v1/responses back.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from millrace.proxy.errors import bad_field, shown
from millrace.proxy.request.item_ids import input_item_id
from millrace.proxy.request.models.responses import LOGPROBS
from millrace.proxy.request.models.sampling import SamplingFields
from millrace.proxy.request.reading import read_body, write_body
from millrace.proxy.request.renaming import FieldNames
from millrace.proxy.request.validation import Bodies, ChatRequest

Json = dict[str, Any]

#: Fields that have the same name and meaning in both APIs.
_SAME = [
    *SamplingFields.__annotations__,
    "model",
    "chat_template_kwargs",
    "logit_bias",
    "max_reasoning_tokens",
    "parallel_tool_calls",
    "stream",
    "structured_outputs",
    "thinking_token_budget",
]
#: What clients of responses call the fields of a chat's body.
RESPONSE_NAMES = FieldNames(
    {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "tool_choice.allowed_tools": "tool_choice",
        "tool_choice.custom": "tool_choice",
        "tool_choice.function": "tool_choice",
    }
)

_ROLES = {"developer": "system"}
#: The items of calls: the type of the tool, and the field with the text that it gets.
_CALLS = {"function_call": ("function", "arguments"), "custom_tool_call": ("custom", "input")}
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
#: The type of an item that stands for an item of a stored response.
REFERENCE = "item_reference"


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseRequest:
    """A checked request. `items` are the input as the API shows it; `fields` all checked fields.

    References among the items have to be replaced before the request is read as a chat.
    """

    fields: Json
    items: list[Json]

    @property
    def messages(self) -> list[Json]:
        """The input as messages of a chat."""
        return messages_of(self.items)

    @property
    def store(self) -> bool:
        return bool(self.fields.get("store", True))

    @property
    def background(self) -> bool:
        return bool(self.fields.get("background", False))

    @property
    def stream(self) -> bool:
        return bool(self.fields.get("stream", False))

    @property
    def previous(self) -> str | None:
        return self.fields.get("previous_response_id")

    @property
    def conversation(self) -> str | None:
        """The id of the conversation that the response continues."""
        given = self.fields.get("conversation")
        return given["id"] if isinstance(given, dict) else given

    @property
    def truncates(self) -> bool:
        return self.fields.get("truncation") == "auto"


def read_response(bodies: Bodies, body: bytes, response_id: str) -> ResponseRequest:
    """Checks the body of a request for the response `response_id`.

    Raises ApiError naming the field.
    """
    fields = read_body(bodies.types.response, body)
    if fields.get("background") and not fields.get("store", True):
        raise bad_field("background", "needs 'store' to be true.")
    if "stream_options" in fields and not fields.get("stream"):
        raise bad_field("stream_options", "is only allowed when 'stream' is true.")
    given = fields["input"]
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    if fields.get("conversation") and fields.get("previous_response_id"):
        raise bad_field("conversation", "can't go together with 'previous_response_id'.")
    items = [
        shown_item(item, partial(input_item_id, response_id=response_id, place=place))
        for place, item in enumerate(given)
    ]
    return ResponseRequest(fields=fields, items=items)


def read_as_chat(
    bodies: Bodies, request: ResponseRequest, history: Sequence[Json], dropped: int = 0
) -> ChatRequest:
    """Returns the request as a chat after `history`, without its first `dropped` messages.

    Raises ApiError naming the field of the response.
    """
    fields = request.fields
    _check_outputs(history, request.items)
    chat = {name: fields[name] for name in _SAME if name in fields}
    messages = [*history, *request.messages][dropped:]
    if dropped:
        calls = _call_ids(messages)
        messages = [m for m in messages if m["role"] != "tool" or m["tool_call_id"] in calls]
    if instructions := fields.get("instructions"):
        messages.insert(0, {"role": "system", "content": instructions})
    chat["messages"] = messages
    if "max_output_tokens" in fields:
        chat["max_completion_tokens"] = fields["max_output_tokens"]
    if effort := fields.get("reasoning", {}).get("effort"):
        chat["reasoning_effort"] = effort
    if LOGPROBS in fields.get("include", ()):
        chat |= {"logprobs": True, "top_logprobs": fields.get("top_logprobs", 0)}
    chat |= _response_format(fields.get("text", {}).get("format"))
    chat |= _tools(fields)
    with RESPONSE_NAMES.used():
        return bodies.read_chat(write_body(chat))


def most_dropped(messages: Sequence[Mapping[str, Any]]) -> int:
    """Returns how many of the oldest messages may go: the last stays, with the call it answers."""
    last = len(messages) - 1
    while last > 0 and messages[last]["role"] == "tool":
        last -= 1
    return last


def _check_outputs(history: Sequence[Json], items: Sequence[Json]) -> None:
    """Raises ApiError if an output answers no call before it."""
    called = _call_ids(history)
    for i, item in enumerate(items):
        if item["type"] in _CALLS:
            called.add(item["call_id"])
        elif item["type"] in _OUTPUTS and item["call_id"] not in called:
            wrong = f"answers no call of an earlier item: {shown(item['call_id'])}."
            raise bad_field(f"input[{i}].call_id", wrong)


def _call_ids(messages: Sequence[Json]) -> set[str]:
    return {call["id"] for message in messages for call in message.get("tool_calls", ())}


def _tools(fields: Mapping[str, Any]) -> Json:
    """Returns the tools and the choice between them as a chat's."""
    found: Json = {}
    if tools := fields.get("tools"):
        found["tools"] = [_as_tool(tool) for tool in tools]
    if choice := fields.get("tool_choice"):
        found["tool_choice"] = _as_choice(choice)
    return found


def _as_choice(choice: str | Mapping[str, Any]) -> str | Json:
    if isinstance(choice, str):
        return choice
    if choice["type"] == "allowed_tools":
        tools = [_as_tool(tool) for tool in choice["tools"]]
        allowed = {"mode": choice["mode"], "tools": tools}
        return {"type": choice["type"], "allowed_tools": allowed}
    return _as_tool(choice)


def _as_tool(tool: Mapping[str, Any]) -> Json:
    """Returns a tool, or its name, in the form of a chat."""
    kind, fields = tool["type"], {k: v for k, v in tool.items() if k != "type"}
    if (form := fields.get("format")) and form["type"] == "grammar":
        grammar = {name: form[name] for name in ("syntax", "definition")}
        fields["format"] = {"type": "grammar", "grammar": grammar}
    return {"type": kind, kind: fields}


def _response_format(given: Mapping[str, Any] | None) -> Json:
    """Returns a `text.format` as a chat's `response_format`, or no field."""
    if given is None:
        return {}
    kind = given["type"]
    schema = {k: v for k, v in given.items() if k != "type" and v is not None}
    if kind == "json_schema":
        return {"response_format": {"type": kind, "json_schema": schema}}
    if schema:
        wrong = "is only allowed with type 'json_schema'."
        raise bad_field(f"text.format.{next(iter(schema))}", wrong)
    return {"response_format": {"type": kind}}


def messages_of(items: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Returns items of an input or an output as messages of a chat, in order."""
    messages: list[Json] = []
    for item in items:
        kind = item["type"]
        if kind == "message":
            role = _ROLES.get(item["role"], item["role"])
            messages.append({"role": role, "content": _content(item["content"])})
        elif kind in _CALLS:
            _add_call(messages, item)
        elif kind in _OUTPUTS:
            content = _content(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    return messages


def _add_call(messages: list[Json], item: Mapping[str, Any]) -> None:
    """Adds a call to the assistant's message before it, or to a new message."""
    kind, text = _CALLS[item["type"]]
    called = {"name": item["name"], text: item[text]}
    call = {"id": item["call_id"], "type": kind, kind: called}
    if not (messages and messages[-1]["role"] == "assistant"):
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _content(content: str | Sequence[Mapping[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "\n".join(part.get("text") or part.get("refusal", "") for part in content)


def shown_item(item: Mapping[str, Any], make_id: Callable[[str], str]) -> Json:
    """Returns an item as the API shows it: with type and id, and content as parts.

    `make_id` returns the id of an item of this type.
    """
    shown = {name: value for name, value in item.items() if value is not None}
    shown.setdefault("type", "message" if "role" in shown else REFERENCE)
    if shown["type"] == "message":
        if isinstance(shown["content"], str):
            kind = "output_text" if shown["role"] == "assistant" else "input_text"
            shown["content"] = [{"type": kind, "text": shown["content"]}]
        for part in shown["content"]:
            if part["type"] == "output_text":
                part.setdefault("annotations", [])
        shown.setdefault("status", "completed")
    if "id" not in shown:
        shown["id"] = make_id(shown["type"])
    return shown
