"""Checks JSON (RFC 8259) that arrives in pieces, without building its value."""

from __future__ import annotations

import re

#: Arrays and objects that may be open at a time: readers of such JSON recurse.
MOST_LEVELS = 100
#: The most characters of a number.
_MOST_WORD = 1024

_SPACE = re.compile(r"[ \t\n\r]*")
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_WORD_CHARACTERS = re.compile(r"[-+.0-9A-Za-z]*")
_WORD = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null", re.ASCII)


class JsonScanner:
    """Reads one JSON value. Memory: one character per open array or object."""

    __slots__ = ("_in_key", "_left", "_open", "_state", "_word", "bad", "done")

    def __init__(self) -> None:
        #: True once the value is complete.
        self.done = False
        #: True once the text can't be JSON.
        self.bad = False
        self._open: list[str] = []
        self._state = self._value
        self._in_key = False
        self._word = ""
        self._left = 0

    def read(self, text: str, at: int) -> int:
        """Reads `text` from `at` on; returns the position after the last character it took."""
        while at < len(text) and not self.done and not self.bad:
            at = self._state(text, at)
        return at

    def _value(self, text: str, at: int) -> int:
        at = _space(text, at)
        if at == len(text):
            return at
        character = text[at]
        if character == '"':
            self._state = self._string
        elif character in "{[":
            if len(self._open) == MOST_LEVELS:
                return self._fail(at)
            self._open.append("}" if character == "{" else "]")
            self._state = self._first_key if character == "{" else self._first_item
        elif character in "-0123456789tfn":
            self._word, self._state = "", self._in_word
            return at
        else:
            return self._fail(at)
        return at + 1

    def _first_item(self, text: str, at: int) -> int:
        return self._close_or(text, at, "]", self._value)

    def _first_key(self, text: str, at: int) -> int:
        return self._close_or(text, at, "}", self._key)

    def _close_or(self, text: str, at: int, end: str, other: object) -> int:
        at = _space(text, at)
        if at < len(text):
            if text[at] == end:
                return self._close(at)
            self._state = other  # type: ignore[assignment] # one of the steps
        return at

    def _key(self, text: str, at: int) -> int:
        return self._expect(text, at, '"', self._key_string)

    def _key_string(self, text: str, at: int) -> int:
        self._in_key, self._state = True, self._string
        return at

    def _colon(self, text: str, at: int) -> int:
        return self._expect(text, at, ":", self._value)

    def _expect(self, text: str, at: int, wanted: str, then: object) -> int:
        at = _space(text, at)
        if at == len(text):
            return at
        if text[at] != wanted:
            return self._fail(at)
        self._state = then  # type: ignore[assignment] # one of the steps
        return at + 1

    def _string(self, text: str, at: int) -> int:
        found = _PLAIN.match(text, at)
        assert found is not None  # it matches the empty string
        at = found.end()
        if at == len(text):
            return at
        if text[at] == "\\":
            self._state = self._escape
        elif text[at] != '"':
            return self._fail(at)
        elif self._in_key:
            self._in_key, self._state = False, self._colon
        else:
            self._ended()
        return at + 1

    def _escape(self, text: str, at: int) -> int:
        if text[at] == "u":
            self._left, self._state = 4, self._unicode
        elif text[at] in '"\\/bfnrt':
            self._state = self._string
        else:
            return self._fail(at)
        return at + 1

    def _unicode(self, text: str, at: int) -> int:
        if text[at] not in "0123456789abcdefABCDEF":
            return self._fail(at)
        self._left -= 1
        if self._left == 0:
            self._state = self._string
        return at + 1

    def _in_word(self, text: str, at: int) -> int:
        found = _WORD_CHARACTERS.match(text, at)
        assert found is not None  # it matches the empty string
        end = min(found.end(), at + _MOST_WORD + 1 - len(self._word))
        self._word += text[at:end]
        if len(self._word) > _MOST_WORD:
            return self._fail(end)
        if end < len(text):
            if not _WORD.fullmatch(self._word):
                return self._fail(end)
            self._ended()
        return end

    def _after(self, text: str, at: int) -> int:
        at = _space(text, at)
        if at == len(text):
            return at
        if text[at] == self._open[-1]:
            return self._close(at)
        return self._expect(text, at, ",", self._key if self._open[-1] == "}" else self._value)

    def _close(self, at: int) -> int:
        self._open.pop()
        self._ended()
        return at + 1

    def _ended(self) -> None:
        self.done = not self._open
        self._state = self._after

    def _fail(self, at: int) -> int:
        self.bad = True
        return at


def _space(text: str, at: int) -> int:
    found = _SPACE.match(text, at)
    assert found is not None  # it matches the empty string
    return found.end()
