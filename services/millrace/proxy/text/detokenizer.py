"""Turns token ids into text piece by piece: whole characters, constant work per token."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
#: The most tokens without text in a window before its text is used unchanged. UTF-8's longest
#: character takes four byte tokens; skipped special tokens may come between them.
_MAX_HELD_TOKENS = 16


class Detokenizer(Protocol):
    """Builds one sequence's text: the joined results of `feed`, and then of `flush`."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Takes tokens, and returns the text that became certain; empty inside a character."""

    def flush(self) -> str:
        """Returns the rest of the text at the end of the sequence."""


class ByteDetokenizer:
    """Decodes byte-level BPE: tokens are bytes, so the text is their UTF-8 decoding.

    `table[id]` holds a token's bytes, empty for skipped tokens. The text equals the tokenizer's own
    decoding of the whole sequence, invalid bytes included.
    """

    __slots__ = ("_decode", "_table")

    def __init__(self, table: Sequence[bytes]) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def feed(self, token_ids: Sequence[int]) -> str:
        if len(token_ids) == 1:
            return self._decode(self._table[token_ids[0]])
        table = self._table
        return self._decode(b"".join([table[i] for i in token_ids]))

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """Decodes with any other tokenizer: decodes a short window of tokens and returns its new text.

    The window holds the tokens of the last text and the tokens since then. A decoder may change the
    start of a text (sentencepiece drops a leading space), and so changes both decodings alike.
    `context_ids` are the prompt's last tokens. Text that ends in a replacement character waits for
    the rest of the character.
    """

    __slots__ = ("_context", "_context_text", "_decode", "_held")

    def __init__(
        self, decode: Callable[[Sequence[int]], str], context_ids: Sequence[int] = ()
    ) -> None:
        self._decode = decode
        self._context = list(context_ids)
        self._context_text = decode(self._context) if self._context else ""
        self._held: list[int] = []

    def feed(self, token_ids: Sequence[int]) -> str:
        text = ""
        for token_id in token_ids:
            text += self._step(token_id)
        return text

    def flush(self) -> str:
        return self._take(self._decode(self._context + self._held)) if self._held else ""

    def _step(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        silent = len(text) <= len(self._context_text) or text.endswith(_REPLACEMENT)
        if silent and len(self._held) < _MAX_HELD_TOKENS:
            return ""
        return self._take(text)

    def _take(self, text: str) -> str:
        new = text[len(self._context_text) :]
        if new:
            self._context, self._held = self._held, []
            self._context_text = self._decode(self._context)
        else:
            # None of these tokens has text (they are skipped), so they do not affect later text.
            self._held = []
        return new
