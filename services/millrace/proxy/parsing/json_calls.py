"""Parses the tool calls of model families that write arguments as JSON.

A call is: a marker, a short header, an object, and closing strings. States: text, header, body,
after a call. Text that turns out not to be a call becomes content, the marker included. If a call
breaks after its arguments began, the events so far stay, and the rest of the text is content.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from millrace.proxy.parsing.call_readers import ArgumentsReader, CallReader
from millrace.proxy.parsing.events import Markers
from millrace.proxy.parsing.state_parser import StateParser

#: The most characters between a marker and the object.
_MOST_HEADER = 512
#: The most characters of a call that are held while its name is unknown.
MOST_HELD = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One form of a call: what stands before the object, and what may follow the object.

    If `header` has a group `name`, the object is the arguments; otherwise the object is the call.
    """

    header: re.Pattern[str]
    closers: tuple[str, ...] = ()
    separators: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Syntax:
    """The forms of one family, tried in order. `bare`: an answer may begin with this string.
    `forced`: it is nothing but calls, so a call that is cut before its name is no content either.
    """

    markers: tuple[str, ...]
    forms: tuple[Form, ...]
    bare: str = ""
    forced: bool = False


HERMES = Syntax(
    markers=("<tool_call>",),
    forms=(Form(header=re.compile(r"\s*"), closers=("</tool_call>",)),),
)
LLAMA_JSON = Syntax(
    markers=("<|python_tag|>",),
    forms=(Form(header=re.compile(r"\s*"), separators=(";",)),),
    bare="{",
)
#: A JSON array of calls, the form of answers that a constraint forces to be calls.
FORCED = Syntax(
    markers=(),
    forms=(Form(header=re.compile(r"\s*\[\s*"), closers=("]",), separators=(",",)),),
    bare="[",
    forced=True,
)
_NAME = r"(?P<name>[\w.-]+)"
MISTRAL = Syntax(
    markers=("[TOOL_CALLS]",),
    forms=(
        Form(header=re.compile(r"\s*\[\s*"), closers=("]",), separators=(",",)),
        Form(header=re.compile(rf"\s*{_NAME}(?:\[CALL_ID\][\w-]+)?(?:\[ARGS\])?\s*")),
    ),
)
#: DeepSeek writes its tokens with a full-width bar and a low block.
DEEPSEEK_TOKENS = tuple(
    f"<\uff5c{name}\uff5c>".replace(" ", "\u2581")
    for name in (
        "tool calls begin",
        "tool call begin",
        "tool sep",
        "tool call end",
        "tool calls end",
    )
)
_CALLS, _CALL, _SEP, _CALL_END, _CALLS_END = DEEPSEEK_TOKENS
DEEPSEEK = Syntax(
    markers=(_CALLS, _CALL),
    forms=(
        Form(
            header=re.compile(
                rf"\s*(?:{_CALL})?\s*(?:function{_SEP})?{_NAME}(?:{_SEP})?\s*(?:```json\s*)?"
            ),
            closers=("```", _CALL_END, _CALLS_END),
        ),
    ),
)


class JsonCalls(StateParser):
    """Parses one answer. `known`: the names of the functions that the client offers."""

    def __init__(self, syntax: Syntax, known: Collection[str]) -> None:
        super().__init__(self._beginning if syntax.bare else self._text)
        self._syntax, self._known = syntax, known
        self._markers = Markers(*syntax.markers)
        self._form = syntax.forms[0]
        self._separated = False
        self._bare = False
        self._raw: list[str] = []
        self._raw_size = 0
        self._reader: CallReader | ArgumentsReader | None = None
        self._calls = 0

    def _end(self) -> None:
        started = self._reader is not None and self._reader.started
        rest = self._buffer if started else "".join(self._raw) + self._buffer
        self._raw, self._buffer = [], ""
        if self._syntax.forced and self._state != self._text:
            return
        if self._state != self._after or rest.strip():
            self._show(rest)

    def _beginning(self) -> bool:
        """A bare object is a call only at the beginning of the answer."""
        stripped = self._buffer.lstrip()
        spaces = len(self._buffer) - len(stripped)
        if not stripped and spaces <= _MOST_HEADER:
            return False
        if stripped.startswith(self._syntax.bare) and spaces <= _MOST_HEADER:
            self._bare = True
            self._open(self._buffer[:spaces], stripped)
        else:
            self._state = self._text
        return True

    def _text(self) -> bool:
        marker = self._show_to(self._markers)
        if marker is None:
            return False
        self._bare = False
        self._open(marker, self._buffer[len(marker) :])
        return True

    def _open(self, raw: str, rest: str) -> None:
        """Begins a header after `raw`, which is content if no call follows."""
        self._raw, self._raw_size, self._buffer = [raw], len(raw), rest
        self._separated = False
        self._state = self._header

    def _header(self) -> bool:
        at = self._buffer.find("{", 0, _MOST_HEADER + 1)
        if at < 0:
            if len(self._buffer) <= _MOST_HEADER:
                return False
            return self._fail()
        head = self._buffer[:at]
        name = self._choose_form(head)
        if name is None:
            return self._fail()
        self._hold(head)
        self._buffer = self._buffer[at:]
        self._reader = (
            ArgumentsReader(self._calls, name) if name else CallReader(self._calls, self._accepts)
        )
        self._state = self._body
        return True

    def _choose_form(self, head: str) -> str | None:
        """Returns the name in the header, empty if it has none; None if no form fits."""
        if self._separated:
            return None if head.strip() else ""
        for form in self._syntax.forms:
            if found := form.header.fullmatch(head):
                self._form = form
                return found.groupdict().get("name") or ""
        return None

    def _accepts(self, name: str) -> bool:
        return name in self._known if self._bare else True

    def _body(self) -> bool:
        reader = self._reader
        assert reader is not None
        was_started = reader.started
        room = len(self._buffer) if was_started else MOST_HELD - self._raw_size
        piece = self._buffer[:room]
        end = reader.read(piece, 0, self._events)
        if not reader.started:
            self._hold(self._buffer[:end])
        self._buffer = self._buffer[end:]
        if reader.started and not was_started:
            self._calls += 1
            self._raw = []
        if reader.bad or (not reader.started and self._raw_size >= MOST_HELD):
            self._reader = None
            return self._fail() if not reader.started else self._go(self._text)
        if reader.done:
            self._reader = None
            return self._go(self._after)
        return bool(self._buffer)

    def _hold(self, text: str) -> None:
        self._raw.append(text)
        self._raw_size += len(text)

    def _fail(self) -> bool:
        """Makes the held text content, and looks for calls in the text after it."""
        self._show("".join(self._raw))
        self._raw = []
        return self._go(self._text)

    def _after(self) -> bool:
        """Skips closing strings, and spaces before another call."""
        stripped = self._buffer.lstrip()
        if len(self._buffer) - len(stripped) > _MOST_HEADER:
            return self._go(self._text)
        for closer in self._form.closers:
            if stripped.startswith(closer):
                self._buffer = stripped[len(closer) :]
                return True
        for opener in (*self._form.separators, *self._syntax.markers):
            if stripped.startswith(opener):
                self._bare = self._bare and opener in self._form.separators
                self._open(opener, stripped[len(opener) :])
                self._separated = opener in self._form.separators
                return True
        literals = (*self._form.closers, *self._form.separators, *self._syntax.markers)
        if any(literal.startswith(stripped) for literal in literals):
            return False
        return self._go(self._text)
