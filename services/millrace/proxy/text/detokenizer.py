"""Token ids to text, piece by piece: never half a character, constant work a token."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Protocol

_REPLACEMENT = "\ufffd"
#: Tokens a window may hold without text before it is read as it stands. Four suffice for UTF-8's
#: longest character of byte tokens; skipped special tokens may stand between them.
_MAX_HELD_TOKENS = 16


class Detokenizer(Protocol):
    """Text of one sequence. What `feed` returned, joined, plus `flush`, is the sequence's text."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """Text that became certain with these tokens; empty inside a character."""

    def flush(self) -> str:
        """What is left when the sequence is over."""


class ByteDetokenizer:
    """For byte-level BPE: a token is its bytes, so the text is one UTF-8 decoding of them all.

    `table[id]` are a token's bytes, empty for what is skipped. Equals the tokenizer's own decoding
    of the whole sequence, invalid bytes included.
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
    """For any other tokenizer: decodes a short window of tokens and takes what is new in it.

    The window holds the tokens behind the last text and those since, so that what a decoder does
    at the start of a text (sentencepiece drops a leading space there) touches both alike.
    `context_ids` are the prompt's last tokens. Text that ends in a replacement character waits for
    the rest of it.
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
            # Nothing to show in all of them (skipped tokens): they say nothing to what follows.
            self._held = []
        return new
