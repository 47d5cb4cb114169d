"""What parsers with states share: the text that is held, the events that are certain."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

from millrace.proxy.parsing.events import Content, Event, Markers, Reasoning, joined

#: Takes text from the front of the buffer; returns False if it needs more text.
State = Callable[[], bool]


class StateParser(ABC):
    """A parser of one answer whose `_state` decides what the text in `_buffer` means."""

    def __init__(self, first: State) -> None:
        self._state = first
        self._buffer = ""
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        self._buffer += text
        while self._buffer and self._state():
            pass
        return self._certain()

    def finish(self) -> list[Event]:
        self._end()
        return self._certain()

    @abstractmethod
    def _end(self) -> None:
        """Adds the events of the text that is still held when the answer ends."""

    def _certain(self) -> list[Event]:
        events, self._events = self._events, []
        return joined(events)

    def _go(self, state: State) -> bool:
        self._state = state
        return True

    def _show(self, text: str, kind: type[Content | Reasoning] = Content) -> None:
        if text:
            self._events.append(kind(text))

    def _show_to(self, markers: Markers, kind: type[Content | Reasoning] = Content) -> str | None:
        """Shows the text before the first marker, and returns the marker: the buffer begins with
        it. None: more text is needed, and what may begin a marker stays in the buffer.
        """
        found = markers.find(self._buffer)
        at = len(self._buffer) - markers.partial(self._buffer) if found is None else found[0]
        self._show(self._buffer[:at], kind)
        self._buffer = self._buffer[at:]
        return None if found is None else found[1]
