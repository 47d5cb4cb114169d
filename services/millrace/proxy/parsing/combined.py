"""Parses the content that another parser finds."""

from __future__ import annotations

from millrace.proxy.parsing.events import Content, Event, Parser, joined


class Combined:
    """Lets `inner` parse the content of `outer`; other events stay."""

    def __init__(self, outer: Parser, inner: Parser) -> None:
        self._outer, self._inner = outer, inner

    def feed(self, text: str) -> list[Event]:
        return self._parsed(self._outer.feed(text))

    def finish(self) -> list[Event]:
        return joined([*self._parsed(self._outer.finish()), *self._inner.finish()])

    def _parsed(self, events: list[Event]) -> list[Event]:
        found: list[Event] = []
        for event in events:
            found += self._inner.feed(event.text) if isinstance(event, Content) else [event]
        return joined(found)
