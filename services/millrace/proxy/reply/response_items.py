"""The items of a response's output: messages, reasoning and calls, and their stream events."""

from __future__ import annotations

import uuid
from typing import Any, Literal, Protocol

from millrace.proxy.reply.parsed import ParsedAnswer

Json = dict[str, Any]
#: The type of an event, and its fields beside those that name the item.
Event = tuple[str, Json]

#: The fields of a chat's delta that hold text, and the kind of item that shows it.
_TEXTS: tuple[tuple[str, Literal["message", "reasoning"]], ...] = (
    ("reasoning", "reasoning"),
    ("content", "message"),
)


class Emit(Protocol):
    """Adds an event to the response's stream, if it has one."""

    def __call__(self, kind: str, **fields: object) -> None: ...


class _Item(Protocol):
    """One item of the output, which grows until it is closed."""

    kind: str
    id: str

    def document(self, status: str) -> Json: ...

    def opened(self) -> tuple[Json, list[Event]]:
        """Returns the item as it begins, and the events after its first."""

    def grow(self, text: str) -> Event: ...

    def closed(self) -> list[Event]:
        """Returns the events before its last."""


class _TextItem:
    """A message, or reasoning: an item with one part of text."""

    __slots__ = ("_name", "_text", "id", "kind")

    def __init__(self, kind: Literal["message", "reasoning"]) -> None:
        self.kind: str = kind
        self._name = "output_text" if kind == "message" else "reasoning_text"
        self.id = f"{'msg' if kind == 'message' else 'rs'}_{uuid.uuid4().hex}"
        self._text: list[str] = []

    def document(self, status: str) -> Json:
        return self._with(status, [self._part("".join(self._text))])

    def opened(self) -> tuple[Json, list[Event]]:
        part = {"content_index": 0, "part": self._part("")}
        return self._with("in_progress", []), [("response.content_part.added", part)]

    def grow(self, text: str) -> Event:
        self._text.append(text)
        return self._text_event("delta", {"delta": text})

    def closed(self) -> list[Event]:
        text = "".join(self._text)
        part = {"content_index": 0, "part": self._part(text)}
        return [self._text_event("done", {"text": text}), ("response.content_part.done", part)]

    def _text_event(self, end: str, fields: Json) -> Event:
        more: Json = {"logprobs": []} if self.kind == "message" else {}
        return f"response.{self._name}.{end}", {"content_index": 0, **fields, **more}

    def _part(self, text: str) -> Json:
        more: Json = {"annotations": [], "logprobs": []} if self.kind == "message" else {}
        return {"type": self._name, "text": text, **more}

    def _with(self, status: str, parts: list[Json]) -> Json:
        more: Json = {"role": "assistant"} if self.kind == "message" else {"summary": []}
        return {"type": self.kind, "id": self.id, "status": status, **more, "content": parts}


class _CallItem:
    """The call of a function."""

    __slots__ = ("_arguments", "_call_id", "_name", "id", "kind")

    def __init__(self, call_id: str, name: str) -> None:
        self.kind = "function_call"
        self.id = f"fc_{uuid.uuid4().hex}"
        self._call_id = call_id
        self._name = name
        self._arguments: list[str] = []

    def document(self, status: str) -> Json:
        return {
            "type": self.kind,
            "id": self.id,
            "status": status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
        }

    def opened(self) -> tuple[Json, list[Event]]:
        return self.document("in_progress"), []

    def grow(self, text: str) -> Event:
        self._arguments.append(text)
        return "response.function_call_arguments.delta", {"delta": text}

    def closed(self) -> list[Event]:
        fields = {"name": self._name, "arguments": "".join(self._arguments)}
        return [("response.function_call_arguments.done", fields)]


class OutputItems:
    """Makes the items of an answer's text, in the order in which the model wrote them."""

    __slots__ = ("_answer", "_emit", "_items", "_status")

    def __init__(self, answer: ParsedAnswer | None, emit: Emit) -> None:
        """`answer` parses the text; None if all of it is the message's."""
        self._answer = answer
        self._emit = emit
        self._items: list[_Item] = []
        self._status = "in_progress"

    def feed(self, text: str) -> None:
        """Takes the next text."""
        if self._answer is not None:
            self._take(self._answer.deltas(text, ends=False))
        elif text:
            self._take([{"content": text}])

    def end(self, status: str) -> None:
        """Ends the last item with `status`. An answer without any item gets an empty message."""
        if self._answer is not None:
            self._take(self._answer.deltas("", ends=True))
        if not self._items:
            self._open(_TextItem("message"))
        self._close(status)
        self._status = status

    def documents(self) -> list[Json]:
        """Returns the items. Only the last may be unfinished."""
        *before, last = self._items
        return [*(item.document("completed") for item in before), last.document(self._status)]

    def _take(self, deltas: list[Json]) -> None:
        for delta in deltas:
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    self._open(_CallItem(call["id"], call["function"]["name"]))
                self._grow(call["function"]["arguments"])
            for name, kind in _TEXTS:
                if text := delta.get(name):
                    if not (self._items and self._items[-1].kind == kind):
                        self._open(_TextItem(kind))
                    self._grow(text)

    def _open(self, item: _Item) -> None:
        if self._items:
            self._close("completed")
        self._items.append(item)
        document, events = item.opened()
        self._emit("response.output_item.added", output_index=self._index, item=document)
        self._emit_all(events)

    def _grow(self, text: str) -> None:
        if text:
            self._emit_all([self._items[-1].grow(text)])

    def _close(self, status: str) -> None:
        item = self._items[-1]
        self._emit_all(item.closed())
        document = item.document(status)
        self._emit("response.output_item.done", output_index=self._index, item=document)

    @property
    def _index(self) -> int:
        return len(self._items) - 1

    def _emit_all(self, events: list[Event]) -> None:
        for kind, fields in events:
            self._emit(kind, item_id=self._items[-1].id, output_index=self._index, **fields)
