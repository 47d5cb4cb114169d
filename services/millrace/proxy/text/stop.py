"""Finds stop strings in a stream of text that arrives in pieces."""

from __future__ import annotations


class StopScanner:
    """Returns text up to the first stop string, which may span several tokens.

    The first stop string is the stop string whose last character comes first; if several end there,
    the longest. Text that may begin a stop string is held back. A call takes time in proportion to
    the new text and the longest stop string.
    """

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        #: The stop string that was met; after it `feed` returns no text.
        self.matched: str | None = None

    def feed(self, text: str) -> str:
        """Takes the next piece, and returns the text that may be shown now."""
        if self.matched is not None:
            return ""
        text = self._held + text
        end = len(text) + 1
        start = 0
        for stop in self._stops:
            found = text.find(stop)
            if found < 0:
                continue
            found_end = found + len(stop)
            if (found_end, found) < (end, start):
                end, start, self.matched = found_end, found, stop
        if self.matched is not None:
            self._held = ""
            return text[: end if self._include else start]
        keep = self._partial(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Returns the text that was held back. Call it at the end of the text."""
        held, self._held = self._held, ""
        return held

    def _partial(self, text: str) -> int:
        """Returns the length of the longest suffix of `text` that begins a stop string."""
        best = 0
        for stop in self._stops:
            position = text.find(stop[0], max(0, len(text) - len(stop) + 1))
            while position >= 0 and len(text) - position > best:
                if stop.startswith(text[position:]):
                    best = len(text) - position
                    break
                position = text.find(stop[0], position + 1)
        return best
