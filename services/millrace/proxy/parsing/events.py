"""The events that a parser finds in an answer's text: content, reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text that the model thinks before its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStarted:
    """The start of a tool call. `index` counts the calls of the answer from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of a call's arguments, which are JSON text when joined."""

    index: int
    text: str


Event = Content | Reasoning | CallStarted | Arguments


class Parser(Protocol):
    """Finds the events of one answer. However its text is split, the joined events are equal."""

    def feed(self, text: str) -> list[Event]:
        """Takes the next text, and returns the events that became certain."""

    def finish(self) -> list[Event]:
        """Returns the rest of the events at the end of the text."""


class Markers:
    """Finds the first of some strings in a text that arrives in pieces."""

    def __init__(self, *markers: str) -> None:
        self.all = markers

    def find(self, text: str) -> tuple[int, str] | None:
        """Returns the position and the string of the first marker; the longer of two at one."""
        found = [(text.find(marker), -len(marker), marker) for marker in self.all]
        at = min((each for each in found if each[0] >= 0), default=None)
        return None if at is None else (at[0], at[2])

    def partial(self, text: str) -> int:
        """Returns the length of the longest end of `text` that begins a marker."""
        longest = max(map(len, self.all), default=1) - 1
        for size in range(min(longest, len(text)), 0, -1):
            end = text[-size:]
            if any(marker.startswith(end) for marker in self.all):
                return size
        return 0


def joined(events: Sequence[Event]) -> list[Event]:
    """Returns the events with neighbours of the same kind and call as one event."""
    found: list[Event] = []
    for event in events:
        last = found[-1] if found else None
        if isinstance(event, Content) and isinstance(last, Content):
            found[-1] = Content(last.text + event.text)
        elif isinstance(event, Reasoning) and isinstance(last, Reasoning):
            found[-1] = Reasoning(last.text + event.text)
        elif isinstance(event, Arguments) and isinstance(last, Arguments):
            found[-1] = Arguments(event.index, last.text + event.text)
        else:
            found.append(event)
    return found
