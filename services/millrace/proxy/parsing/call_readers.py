"""Reads one tool call in JSON that arrives in pieces, and passes its arguments on as they come."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

from millrace.proxy.parsing.events import Arguments, CallStarted, Event
from millrace.proxy.parsing.json_scanner import JsonScanner

_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
_SPACE = " \t\n\r"
_NAME = re.compile(r"[^\s\ud800-\udfff]{1,256}")


class ArgumentsReader:
    """Reads the arguments of a call whose name is known: a JSON object."""

    def __init__(self, index: int, name: str) -> None:
        self._index, self._name = index, name
        self._scanner = JsonScanner()
        self.started = False

    @property
    def done(self) -> bool:
        return self._scanner.done

    @property
    def bad(self) -> bool:
        """Whether the text is no call. The events before stay valid if `started`."""
        return self._scanner.bad

    def read(self, text: str, at: int, events: list[Event]) -> int:
        """Reads from `at`, where the object begins at first; returns the position after it."""
        end = self._scanner.read(text, at)
        if end > at:
            if not self.started:
                events.append(CallStarted(self._index, self._name))
                self.started = True
            events.append(Arguments(self._index, text[at:end]))
        return end


class CallReader:
    """Reads an object with `name` and `arguments` (or `parameters`), in any order.

    Arguments may also be null, absent, or a string that holds the object.
    """

    def __init__(self, index: int, accepts: Callable[[str], bool]) -> None:
        self._index, self._accepts = index, accepts
        self._state = self._begin
        self._scanner = JsonScanner()
        self._held: list[str] = []
        self._key = ""
        self._seen: set[str] = set()
        self._name: str | None = None
        self._early: str | None = None
        self._events: list[Event] = []
        self.started = False
        self.done = False
        self.bad = False

    def read(self, text: str, at: int, events: list[Event]) -> int:
        """Reads from `at`; returns the position after the last character that it took."""
        self._events = events
        while at < len(text) and not self.done and not self.bad:
            if text[at] in _SPACE and self._state not in (self._in_key, self._in_value):
                at += 1
            else:
                at = self._state(text, at)
        return at

    def _begin(self, text: str, at: int) -> int:
        self.bad = text[at] != "{"
        self._state = self._next_key
        return at + (not self.bad)

    def _next_key(self, text: str, at: int) -> int:
        self.bad = text[at] != '"'  # an empty object names no function
        self._scanner, self._held, self._state = JsonScanner(), [], self._in_key
        return at

    def _in_key(self, text: str, at: int) -> int:
        end = self._scanner.read(text, at)
        self._held.append(text[at:end])
        self.bad = self._scanner.bad
        if self._scanner.done:
            key = json.loads("".join(self._held))
            same = "arguments" if key in _ARGUMENTS else key
            self.bad = key not in _KEYS or same in self._seen
            self._key = same
            self._seen.add(same)
            self._state = self._colon
        return end

    def _colon(self, text: str, at: int) -> int:
        self.bad = text[at] != ":"
        self._state = self._first
        return at + (not self.bad)

    def _first(self, text: str, at: int) -> int:
        wanted = {"arguments": '{"n', "name": '"'}.get(self._key)
        self.bad = wanted is not None and text[at] not in wanted
        self._scanner, self._held, self._state = JsonScanner(), [], self._in_value
        if self._key == "arguments" and text[at] == "{" and self._name is not None:
            self._start()
        return at

    def _in_value(self, text: str, at: int) -> int:
        end = self._scanner.read(text, at)
        if self.started and self._key == "arguments":
            self._events.append(Arguments(self._index, text[at:end]))
        else:
            self._held.append(text[at:end])
        self.bad = self._scanner.bad
        if self._scanner.done:
            self._end_value()
            self._state = self._comma_or_end
        return end

    def _end_value(self) -> None:
        held = "".join(self._held)
        if self._key == "name":
            name = json.loads(held)
            self.bad = not _NAME.fullmatch(name) or not self._accepts(name)
            self._name = None if self.bad else name
        elif self._key == "arguments" and not self.started:
            self._early = _object_text(held)
            self.bad = self._early is None
        if self._early is not None and self._name is not None and not self.started:
            self._start()
            self._events.append(Arguments(self._index, self._early))

    def _comma_or_end(self, text: str, at: int) -> int:
        if text[at] == ",":
            self._state = self._next_key
        elif text[at] != "}" or self._name is None:
            self.bad = True
            return at
        else:
            if not self.started:
                self._start()
                self._events.append(Arguments(self._index, "{}"))
            self.done = True
        return at + 1

    def _start(self) -> None:
        assert self._name is not None
        self.started = True
        self._events.append(CallStarted(self._index, self._name))


def _object_text(text: str) -> str | None:
    """Returns the object of complete arguments as JSON text; None if they are no object."""
    if text == "null":
        return "{}"
    if text.startswith('"'):
        inner = json.loads(text)
        scanner = JsonScanner()
        end = scanner.read(inner, 0)
        whole = scanner.done and not inner[end:].strip() and inner.lstrip().startswith("{")
        halves = any("\ud800" <= character <= "\udfff" for character in inner)
        return inner.strip() if whole and not halves else None
    return text if text.startswith("{") else None
