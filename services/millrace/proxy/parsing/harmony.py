"""Parses gpt-oss' answers: messages on channels (OpenAI's harmony format).

`<|channel|>analysis<|message|>...<|end|>` is reasoning, the channel `final` is content, and a
message `to=functions.NAME` is a tool call. A message to nobody on `commentary` is content.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from millrace.proxy.parsing.call_readers import ArgumentsReader
from millrace.proxy.parsing.events import Content, Event, Markers, Reasoning, joined

_MESSAGE = "<|message|>"
_OPENERS = ("<|start|>", "<|channel|>")
_CLOSERS = ("<|end|>", "<|call|>", "<|return|>")
#: The tokens of the format, which are special tokens of the model.
HARMONY_TOKENS = (*_OPENERS, *_CLOSERS, _MESSAGE, "<|constrain|>")
_MOST_HEADER = 512
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


class Harmony:
    """Parses one answer. `calls`: whether the client offers tools; otherwise calls are content."""

    def __init__(self, *, calls: bool) -> None:
        self._offers = calls
        self._markers = Markers(*_OPENERS, *_CLOSERS)
        self._state: Callable[[], bool] = self._beginning
        self._show: type[Content | Reasoning] = Content
        self._name = ""
        self._reader: ArgumentsReader | None = None
        self._calls = 0
        self._buffer = ""
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        self._buffer += text
        while self._buffer and self._state():
            pass
        events, self._events = self._events, []
        return joined(events)

    def finish(self) -> list[Event]:
        rest, self._buffer = self._buffer, ""
        # A header that the answer's end cuts off says nothing.
        if rest.strip() and not rest.lstrip().startswith(_OPENERS):
            self._events.append(self._show(rest))
        events, self._events = self._events, []
        return joined(events)

    def _beginning(self) -> bool:
        """An answer that continues a message begins without a header."""
        return self._header_or(self._text)

    def _between(self) -> bool:
        self._show = Content
        return self._header_or(self._text)

    def _header_or(self, otherwise: Callable[[], bool]) -> bool:
        stripped = self._buffer.lstrip()
        few = len(self._buffer) - len(stripped) <= _MOST_HEADER
        if few and stripped.startswith(_OPENERS):
            self._state = self._header
        elif few and any(opener.startswith(stripped) for opener in _OPENERS):
            return False
        else:
            self._state = otherwise
        return True

    def _header(self) -> bool:
        at = self._buffer.find(_MESSAGE, 0, _MOST_HEADER)
        if at < 0:
            if len(self._buffer) < _MOST_HEADER:
                return False
            self._events.append(Content(self._buffer[:_MOST_HEADER]))
            self._show, self._buffer = Content, self._buffer[_MOST_HEADER:]
            self._state = self._text
            return True
        header, self._buffer = self._buffer[:at], self._buffer[at + len(_MESSAGE) :]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        reasons = channel is not None and channel.group(1) == "analysis"
        self._show = Reasoning if reasons else Content
        self._state = self._text
        if recipient is not None and self._offers:
            self._name, self._state, self._show = recipient.group(1), self._before_call, Content
        return True

    def _before_call(self) -> bool:
        stripped = self._buffer.lstrip()
        few = len(self._buffer) - len(stripped) <= _MOST_HEADER
        if not stripped and few:
            return False
        self._state = self._text
        if stripped.startswith("{") and few:
            self._buffer = stripped
            self._reader = ArgumentsReader(self._calls, self._name)
            self._calls += 1
            self._state = self._in_call
        return True

    def _in_call(self) -> bool:
        assert self._reader is not None
        end = self._reader.read(self._buffer, 0, self._events)
        self._buffer = self._buffer[end:]
        if self._reader.done or self._reader.bad:
            self._state = self._after_call if self._reader.done else self._text
            self._reader = None
        return True

    def _after_call(self) -> bool:
        self._buffer = self._buffer.lstrip()
        if self._buffer:
            self._state = self._text
        return bool(self._buffer)

    def _text(self) -> bool:
        found = self._markers.find(self._buffer)
        at = len(self._buffer) - self._markers.partial(self._buffer) if found is None else found[0]
        if at:
            self._events.append(self._show(self._buffer[:at]))
            self._buffer = self._buffer[at:]
        if found is None:
            return False
        if found[1] in _CLOSERS:
            self._buffer = self._buffer[len(found[1]) :]
            self._state = self._between
        else:
            self._state = self._header
        return True
