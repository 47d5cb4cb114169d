"""Feeds the board: what happens on the fleet, to those who watch.

While nobody watches, the scheduler's loop makes one test per step for it. A listener that reads too
slowly loses its stream; the scheduler never waits for a listener.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

import orjson

from millrace.core.board.events import BoardEvent, Head, head_line, line_of
from millrace.core.board.observer import Observer
from millrace.core.scheduler.effects import Effect
from millrace.core.scheduler.events import Event
from millrace.core.scheduler.machine import Machine
from millrace.scheduler.peers import Outbox

log = logging.getLogger(__name__)

#: The most listeners; each has its own queue of lines.
MAX_LISTENERS = 64
#: The most steps whose lines wait for one listener.
MAX_WAITING = 8_192


class BoardFeed:
    """The listeners of one scheduler. `outboxes` is empty while nobody watches."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._observer: Observer | None = None  # while somebody watches
        self.outboxes: list[Outbox[bytes]] = []

    def watch(self, now_s: float) -> Outbox[bytes]:
        """Adds a listener. Its outbox begins with the head and what is there at `now_s`.

        A listener beyond `MAX_LISTENERS` gets a closed outbox that says so.
        """
        outbox: Outbox[bytes] = Outbox(MAX_WAITING)
        if len(self.outboxes) >= MAX_LISTENERS:
            outbox.close(f"{MAX_LISTENERS} listeners watch the board already")
            return outbox
        observer = Observer(self._machine)
        head = head_line(Head(source="live", zero_unix_s=round(time.time() - now_s, 3)))
        outbox.put(orjson.dumps(head) + b"\n" + _lines(observer.present(now_s), now_s))
        if self._observer is None:
            self._observer = observer
        self.outboxes.append(outbox)
        return outbox

    def leave(self, outbox: Outbox[bytes]) -> None:
        """Removes a listener; the last one ends the observation."""
        if outbox in self.outboxes:
            self.outboxes.remove(outbox)
        if not self.outboxes:
            self._observer = None

    def saw(self, event: Event, effects: Iterable[Effect], now_s: float) -> None:
        """Tells all listeners what happened in a step.

        An error in the observation ends the listeners' streams, and never the scheduler.
        """
        if self._observer is None:
            return
        try:
            found = self._observer.saw(event, effects, now_s)
        except Exception:
            log.exception("the board can't follow %s", type(event).__name__)
            self.close("the scheduler can't follow its own events: see its log")
            return
        if found:
            lines = _lines(found, now_s)
            for outbox in self.outboxes:
                outbox.put(lines)

    def close(self, failure: str = "") -> None:
        """Ends all streams."""
        for outbox in self.outboxes:
            outbox.close(failure)
        self.outboxes.clear()
        self._observer = None


def _lines(found: Iterable[BoardEvent], now_s: float) -> bytes:
    return b"".join(orjson.dumps(line_of(one, now_s)) + b"\n" for one in found)
