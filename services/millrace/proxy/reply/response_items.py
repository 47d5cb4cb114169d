"""The items of a response's output: messages, reasoning and calls, and their stream events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from millrace.proxy.reply.items import Event, Item, Json, TextKind
from millrace.proxy.request.item_ids import output_item_id


class ResponseItems:
    """Makes the items of a response."""

    def __init__(self, response_id: str) -> None:
        self._response_id = response_id

    def text(self, index: int, kind: TextKind) -> Item:
        return _TextItem(output_item_id(kind, self._response_id, index), index, kind)

    def call(self, index: int, call_id: str, name: str, *, custom: bool) -> Item:
        form = _CUSTOM if custom else _FUNCTION
        item_id = output_item_id(form.kind, self._response_id, index)
        return _CallItem(form, item_id, index, call_id, name)


class _TextItem:
    """A message, or reasoning: an item with one part of text."""

    __slots__ = ("_id", "_index", "_logprobs", "_name", "_text", "kind")

    def __init__(self, item_id: str, index: int, kind: TextKind) -> None:
        self.kind: str = kind
        self._index = index
        self._name = "output_text" if kind == "message" else "reasoning_text"
        self._id = item_id
        self._text: list[str] = []
        self._logprobs: list[Json] = []

    def document(self, status: str) -> Json:
        return self._with(status, [self._part("".join(self._text), self._logprobs)])

    def opened(self) -> list[Event]:
        part = self._event("response.content_part.added", part=self._part("", ()))
        return [_added(self._index, self._with("in_progress", [])), part]

    def grow(self, text: str, logprobs: Sequence[Json]) -> Event:
        self._text.append(text)
        self._logprobs.extend(logprobs)
        return self._text_event("delta", logprobs, delta=text)

    def closed(self, status: str) -> list[Event]:
        text = "".join(self._text)
        return [
            self._text_event("done", self._logprobs, text=text),
            self._event("response.content_part.done", part=self._part(text, self._logprobs)),
            _done(self._index, self.document(status)),
        ]

    def _text_event(self, end: str, logprobs: Sequence[Json], **fields: object) -> Event:
        more: Json = {"logprobs": list(logprobs)} if self.kind == "message" else {}
        return self._event(f"response.{self._name}.{end}", **fields, **more)

    def _event(self, kind: str, **fields: object) -> Event:
        of_item = {"item_id": self._id, "output_index": self._index, "content_index": 0}
        return kind, {**of_item, **fields}

    def _part(self, text: str, logprobs: Sequence[Json]) -> Json:
        more: Json = {}
        if self.kind == "message":
            more = {"annotations": [], "logprobs": list(logprobs)}
        return {"type": self._name, "text": text, **more}

    def _with(self, status: str, parts: list[Json]) -> Json:
        more: Json = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return {"type": self.kind, "id": self._id, "status": status, **more, "content": parts}


class _CallForm(NamedTuple):
    """How the call of a function, or of a custom tool, is written. `text`: the field's name."""

    kind: str
    text: str
    event: str


_FUNCTION = _CallForm("function_call", "arguments", "function_call_arguments")
_CUSTOM = _CallForm("custom_tool_call", "input", "custom_tool_call_input")


class _CallItem:
    """The call of a tool."""

    __slots__ = ("_call_id", "_form", "_id", "_index", "_name", "_text", "kind")

    def __init__(self, form: _CallForm, item_id: str, index: int, call_id: str, name: str) -> None:
        self.kind = form.kind
        self._form = form
        self._id = item_id
        self._index = index
        self._call_id = call_id
        self._name = name
        self._text: list[str] = []

    def document(self, status: str) -> Json:
        return {
            "type": self.kind,
            "id": self._id,
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            self._form.text: "".join(self._text),
        }

    def opened(self) -> list[Event]:
        return [_added(self._index, self.document("in_progress"))]

    def grow(self, text: str, logprobs: Sequence[Json]) -> Event:
        self._text.append(text)
        return self._event("delta", delta=text)

    def closed(self, status: str) -> list[Event]:
        text = {self._form.text: "".join(self._text)}
        named = {"name": self._name} if self._form is _FUNCTION else {}
        done = self._event("done", **named, **text)
        return [done, _done(self._index, self.document(status))]

    def _event(self, end: str, **fields: object) -> Event:
        of_item = {"item_id": self._id, "output_index": self._index}
        return f"response.{self._form.event}.{end}", {**of_item, **fields}


def _added(index: int, item: Json) -> Event:
    return "response.output_item.added", {"output_index": index, "item": item}


def _done(index: int, item: Json) -> Event:
    return "response.output_item.done", {"output_index": index, "item": item}
