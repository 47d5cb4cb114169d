"""The blocks of a message of /v1/messages: text, thinking and tool_use, and their stream events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic_core import from_json

from millrace.proxy.reply.items import Event, Item, Json, TextKind


class MessageBlocks:
    """Makes the blocks of a message."""

    def text(self, index: int, kind: TextKind) -> Item:
        return _TextBlock(index, kind)

    def call(self, index: int, call_id: str, name: str, *, custom: bool) -> Item:
        assert not custom, "clients of this API offer functions only"
        return _ToolUseBlock(index, call_id, name)


class _TextBlock:
    """Text, or thinking."""

    __slots__ = ("_index", "_name", "_text", "kind")

    def __init__(self, index: int, kind: TextKind) -> None:
        self.kind: str = kind
        self._index = index
        self._name = "text" if kind == "message" else "thinking"
        self._text: list[str] = []

    def document(self, status: str) -> Json:
        return self._with("".join(self._text))

    def opened(self) -> list[Event]:
        return [_start(self._index, self._with(""))]

    def grow(self, text: str, logprobs: Sequence[Json]) -> Event:
        self._text.append(text)
        return _delta(self._index, f"{self._name}_delta", **{self._name: text})

    def closed(self, status: str) -> list[Event]:
        if self.kind == "message":
            return [_stop(self._index)]
        return [_delta(self._index, "signature_delta", signature=""), _stop(self._index)]

    def _with(self, text: str) -> Json:
        # Thinking comes back unsigned: its text is all that the chat template needs.
        more: Json = {} if self.kind == "message" else {"signature": ""}
        return {"type": self._name, self._name: text, **more}


class _ToolUseBlock:
    """The call of a tool."""

    __slots__ = ("_arguments", "_id", "_index", "_name", "kind")

    def __init__(self, index: int, call_id: str, name: str) -> None:
        self.kind = "tool_use"
        self._index = index
        self._id = call_id.replace("call_", "toolu_", 1)  # other ids are of a template's own form
        self._name = name
        self._arguments: list[str] = []

    def document(self, status: str) -> Json:
        return self._with(_input("".join(self._arguments)))

    def opened(self) -> list[Event]:
        return [_start(self._index, self._with({}))]

    def grow(self, text: str, logprobs: Sequence[Json]) -> Event:
        self._arguments.append(text)
        return _delta(self._index, "input_json_delta", partial_json=text)

    def closed(self, status: str) -> list[Event]:
        return [_stop(self._index)]

    def _with(self, given: Json) -> Json:
        return {"type": self.kind, "id": self._id, "name": self._name, "input": given}


def _input(arguments: str) -> Json:
    """Returns the arguments as an object; of arguments that are cut off, what is complete."""
    try:
        found: Any = from_json(arguments, allow_partial=True)
    except ValueError:
        return {}  # a model may write anything unless its call is forced
    return found if isinstance(found, dict) else {}


def _start(index: int, block: Json) -> Event:
    return "content_block_start", {"index": index, "content_block": block}


def _delta(index: int, kind: str, **fields: str) -> Event:
    return "content_block_delta", {"index": index, "delta": {"type": kind, **fields}}


def _stop(index: int) -> Event:
    return "content_block_stop", {"index": index}
