"""The ids of responses, conversations and items.

An item's id names the response that it belongs to.
"""

from __future__ import annotations

import re
import uuid

#: How the ids of items begin, by their type.
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
}
_RESPONSE, _CONVERSATION = "resp_", "conv_"
_ITEM = re.compile(r"[a-z]+_([0-9a-f]{32})[io][0-9]+")


def new_response_id() -> str:
    """Returns an id that no other response has."""
    return f"{_RESPONSE}{uuid.uuid4().hex}"


def is_response_id(text: str) -> bool:
    """Returns whether a text may be the id of a response: other documents have other ids."""
    return text.startswith(_RESPONSE)


def new_conversation_id() -> str:
    """Returns an id that no other conversation has."""
    return f"{_CONVERSATION}{uuid.uuid4().hex}"


def is_conversation_id(text: str) -> bool:
    """Returns whether a text may be the id of a conversation."""
    return text.startswith(_CONVERSATION)


def new_item_id(kind: str) -> str:
    """Returns the id of an item that belongs to no response."""
    return f"{_PREFIXES[kind]}_{uuid.uuid4().hex}"


def input_item_id(kind: str, response_id: str, place: int) -> str:
    """Returns the id of the item at `place` of a response's input."""
    return f"{_PREFIXES[kind]}_{response_id.removeprefix(_RESPONSE)}i{place}"


def output_item_id(kind: str, response_id: str, place: int) -> str:
    """Returns the id of the item at `place` of a response's output."""
    return f"{_PREFIXES[kind]}_{response_id.removeprefix(_RESPONSE)}o{place}"


def response_of(item_id: str) -> str | None:
    """Returns the id of the response that an item belongs to; None if the id is not our own."""
    found = _ITEM.fullmatch(item_id)
    return None if found is None else _RESPONSE + found.group(1)
