"""Cuts an answer into items: messages, reasoning and calls, in the order of the model's text.

/v1/responses and /v1/messages show such items; each writes them and their events in its own form.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

from millrace.proxy.reply.parsed import ParsedAnswer

Json = dict[str, Any]
#: The type of an event, and its fields.
Event = tuple[str, Json]
#: The kinds of items that hold text.
TextKind = Literal["message", "reasoning"]

#: The fields of a chat's delta that hold text, and the kind of item that shows it.
_TEXTS: tuple[tuple[str, TextKind], ...] = (("reasoning", "reasoning"), ("content", "message"))


class Emit(Protocol):
    """Adds an event to the answer's stream, if it has one."""

    def __call__(self, kind: str, **fields: object) -> None: ...


class Item(Protocol):
    """One item of the output, which grows until it is closed."""

    kind: str

    def document(self, status: str) -> Json: ...

    def opened(self) -> list[Event]: ...

    def grow(self, text: str, logprobs: Sequence[Json]) -> Event:
        """Adds text. `logprobs` are those of its tokens, of a message only, if they are shown."""

    def closed(self, status: str) -> list[Event]: ...


class MakeItems(Protocol):
    """Makes the items of one API; `index` is an item's place in the output."""

    def text(self, index: int, kind: TextKind) -> Item: ...

    def call(self, index: int, call_id: str, name: str, *, custom: bool) -> Item:
        """Makes the call of a function, or of a custom tool: its text is free."""


class OutputItems:
    """Makes the items of an answer's text, and emits their events."""

    __slots__ = ("_answer", "_emit", "_items", "_logprobs", "_make", "_status")

    def __init__(self, answer: ParsedAnswer | None, make: MakeItems, emit: Emit) -> None:
        """`answer` parses the text; None if all of it is the message's."""
        self._answer = answer
        self._make = make
        self._emit = emit
        self._items: list[Item] = []
        #: Of tokens whose text no item has yet: a parser may hold it back.
        self._logprobs: list[Json] = []
        self._status = "in_progress"

    def feed(self, text: str, logprobs: Sequence[Json] = ()) -> None:
        """Takes the next text, and the log probabilities of its tokens if they are shown."""
        self._logprobs.extend(logprobs)
        if self._answer is not None:
            self._take(self._answer.deltas(text, ends=False))
        elif text:
            self._take([{"content": text}])

    def end(self, status: str) -> None:
        """Ends the last item with `status`. An answer without any item gets an empty message."""
        if self._answer is not None:
            self._take(self._answer.deltas("", ends=True))
        if not self._items:
            self._open(self._make.text(0, "message"))
        self._close(status)
        self._status = status

    def documents(self) -> list[Json]:
        """Returns the items. Only the last may be unfinished."""
        *before, last = self._items
        return [*(item.document("completed") for item in before), last.document(self._status)]

    def _take(self, deltas: list[Json]) -> None:
        for delta in deltas:
            for call in delta.get("tool_calls", ()):
                custom = "custom" in call
                called = call["custom" if custom else "function"]
                if "id" in call:
                    at, name = len(self._items), called["name"]
                    self._open(self._make.call(at, call["id"], name, custom=custom))
                self._grow(called["input" if custom else "arguments"])
            for name, kind in _TEXTS:
                if text := delta.get(name):
                    if not (self._items and self._items[-1].kind == kind):
                        self._open(self._make.text(len(self._items), kind))
                    self._grow(text)

    def _open(self, item: Item) -> None:
        if self._items:
            self._close("completed")
        self._items.append(item)
        self._emit_all(item.opened())

    def _grow(self, text: str) -> None:
        if text:
            item = self._items[-1]
            shown = self._logprobs if item.kind == "message" else ()
            self._logprobs = []  # those of reasoning and calls are not shown
            self._emit_all([item.grow(text, shown)])

    def _close(self, status: str) -> None:
        self._emit_all(self._items[-1].closed(status))

    def _emit_all(self, events: list[Event]) -> None:
        for kind, fields in events:
            self._emit(kind, **fields)
