"""Reads the input of custom tools: free text, which a model writes as a function's one argument."""

from __future__ import annotations

import json
import re

from millrace.proxy.parsing.events import Arguments, CallStarted, Event, joined

#: The name of the argument that holds the text.
INPUT = "input"

_OPENING = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_WANTED = f'{{"{INPUT}":"'
_SPACE = re.compile(r"[ \t\r\n]")
_HIGH, _LOW = r"\\u[dD][89abAB][0-9a-fA-F]{2}", r"\\u[dD][c-fC-F][0-9a-fA-F]{2}"
#: The characters of a JSON string that are complete. Half a surrogate pair may still become whole.
_COMPLETE = re.compile(
    rf'(?:[^"\\]|\\["\\/bfnrt]|{_HIGH}{_LOW}|(?!{_HIGH})\\u[0-9a-fA-F]{{4}}'
    rf"|{_HIGH}(?=[^\\]|\\[^u]|\\u(?:[^dD]|[dD][^c-fC-F])))*"
)


class InputReader:
    """Reads the arguments of one call, which arrive in pieces.

    Arguments that are no object with the text `input` first are the input as they stand.
    """

    __slots__ = ("_held", "_state")

    def __init__(self) -> None:
        self._held = ""
        self._state = self._opening

    def read(self, arguments: str) -> str:
        """Takes the next piece, and returns the text of the input that became certain."""
        self._held += arguments
        return self._state()

    def _opening(self) -> str:
        found = _OPENING.match(self._held)
        if found is not None:
            self._held = self._held[found.end() :]
            self._state = self._inside
        elif _WANTED.startswith(_SPACE.sub("", self._held)):
            return ""
        else:
            self._state = self._as_it_stands
        return self._state()

    def _inside(self) -> str:
        found = _COMPLETE.match(self._held)
        assert found is not None  # it matches the empty string
        piece, self._held = found.group(), self._held[found.end() :]
        if self._held.startswith('"'):
            self._state = self._after
        text: str = json.loads(f'"{piece}"', strict=False)
        # Half a surrogate pair is no character.
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")

    def _after(self) -> str:
        self._held = ""
        return ""

    def _as_it_stands(self) -> str:
        text, self._held = self._held, ""
        return text


class WholeInput:
    """Parses an answer that is nothing but the input of the custom tool `name`."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._begun = False

    def feed(self, text: str) -> list[Event]:
        return joined([*self._begin(), self._arguments(json.dumps(text, ensure_ascii=False)[1:-1])])

    def finish(self) -> list[Event]:
        return joined([*self._begin(), self._arguments('"}')])

    def _begin(self) -> list[Event]:
        if self._begun:
            return []
        self._begun = True
        return [CallStarted(0, self._name), self._arguments(_WANTED)]

    def _arguments(self, text: str) -> Event:
        return Arguments(0, text)
