"""Parses gpt-oss' answers: messages on channels (OpenAI's harmony format).

`<|channel|>analysis<|message|>...<|end|>` is reasoning, the channel `final` is content, and a
message `to=functions.NAME` is a tool call. A message to nobody on `commentary` is content.
"""

from __future__ import annotations

import re

from millrace.grammar.reasoning import ANALYSIS, CLOSERS, MESSAGE, MOST_HEADER, OPENERS
from millrace.proxy.parsing.call_readers import ArgumentsReader
from millrace.proxy.parsing.events import Content, Markers, Reasoning
from millrace.proxy.parsing.state_parser import State, StateParser

#: The tokens of the format, which are special tokens of the model.
HARMONY_TOKENS = (*OPENERS, *CLOSERS, MESSAGE, "<|constrain|>")
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"to=(?:functions\.)?([\w.-]+)")


class Harmony(StateParser):
    """Parses one answer. `calls`: whether the client offers tools; otherwise calls are content."""

    def __init__(self, *, calls: bool) -> None:
        super().__init__(self._beginning)
        self._offers = calls
        self._markers = Markers(*OPENERS, *CLOSERS)
        self._kind: type[Content | Reasoning] = Content
        self._name = ""
        self._reader: ArgumentsReader | None = None
        self._calls = 0

    def _end(self) -> None:
        rest, self._buffer = self._buffer, ""
        # A header that the answer's end cuts off says nothing.
        if rest.strip() and not rest.lstrip().startswith(OPENERS):
            self._show(rest, self._kind)

    def _beginning(self) -> bool:
        """An answer that continues a message begins without a header."""
        return self._header_or(self._text)

    def _between(self) -> bool:
        self._kind = Content
        return self._header_or(self._text)

    def _header_or(self, otherwise: State) -> bool:
        stripped = self._buffer.lstrip()
        few = len(self._buffer) - len(stripped) <= MOST_HEADER
        if few and stripped.startswith(OPENERS):
            self._state = self._header
        elif few and any(opener.startswith(stripped) for opener in OPENERS):
            return False
        else:
            self._state = otherwise
        return True

    def _header(self) -> bool:
        at = self._buffer.find(MESSAGE, 0, MOST_HEADER)
        if at < 0:
            if len(self._buffer) < MOST_HEADER:
                return False
            self._show(self._buffer[:MOST_HEADER])
            self._kind, self._buffer = Content, self._buffer[MOST_HEADER:]
            return self._go(self._text)
        header, self._buffer = self._buffer[:at], self._buffer[at + len(MESSAGE) :]
        channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
        reasons = channel is not None and channel.group(1) == ANALYSIS
        self._kind = Reasoning if reasons else Content
        self._state = self._text
        if recipient is not None and self._offers:
            self._name, self._state, self._kind = recipient.group(1), self._before_call, Content
        return True

    def _before_call(self) -> bool:
        stripped = self._buffer.lstrip()
        few = len(self._buffer) - len(stripped) <= MOST_HEADER
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
        marker = self._show_to(self._markers, self._kind)
        if marker is None:
            return False
        if marker in CLOSERS:
            self._buffer = self._buffer[len(marker) :]
            return self._go(self._between)
        return self._go(self._header)
