"""Splits a model's reasoning from its answer: the text between two markers at the beginning."""

from __future__ import annotations

from millrace.grammar.reasoning import MOST_HEADER
from millrace.proxy.parsing.events import Content, Event, Markers, Parser, Reasoning
from millrace.proxy.parsing.state_parser import State, StateParser


class Plain:
    """Makes all text content."""

    def feed(self, text: str) -> list[Event]:
        return [Content(text)] if text else []

    def finish(self) -> list[Event]:
        return []


class ReasoningSplit(StateParser):
    """Makes the text between `start` and `end` reasoning; `answer` parses the text after `end`.

    `opened`: the prompt ends with `start`, so the answer begins with reasoning. Spaces around the
    markers are dropped, except those before `end`. Reasoning that never ends takes all text.
    """

    def __init__(self, start: str, end: str, *, opened: bool, answer: Parser) -> None:
        super().__init__(self._beginning)
        self._start, self._ends = start, Markers(end)
        self._opened, self._answer = opened, answer

    def feed(self, text: str) -> list[Event]:
        if self._state == self._answering:
            return self._answer.feed(text)
        return super().feed(text)

    def _end(self) -> None:
        if self._state == self._reasoning or (self._state == self._beginning and self._opened):
            self._show(self._buffer, Reasoning)
        elif self._state == self._beginning:
            self._events += self._answer.feed(self._buffer)
        self._buffer = ""
        self._events += self._answer.finish()

    def _beginning(self) -> bool:
        stripped = self._buffer.lstrip()
        few = len(self._buffer) - len(stripped) <= MOST_HEADER
        if few and stripped.startswith(self._start):
            self._buffer = stripped[len(self._start) :]
            self._state = self._before_reasoning
        elif few and self._start.startswith(stripped):
            return False
        else:
            self._state = self._before_reasoning if self._opened else self._answering
        return True

    def _before_reasoning(self) -> bool:
        return self._skip_spaces(self._reasoning)

    def _reasoning(self) -> bool:
        end = self._show_to(self._ends, Reasoning)
        if end is None:
            return False
        self._buffer = self._buffer[len(end) :]
        return self._go(self._before_answer)

    def _before_answer(self) -> bool:
        return self._skip_spaces(self._answering)

    def _skip_spaces(self, then: State) -> bool:
        stripped = self._buffer.lstrip()
        self._buffer = stripped
        if stripped:
            self._state = then
        return bool(stripped)

    def _answering(self) -> bool:
        text, self._buffer = self._buffer, ""
        self._events += self._answer.feed(text)
        return False
