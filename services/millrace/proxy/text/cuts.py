"""Finds where a text may be cut, so that its pieces have the same tokens as the whole.

Tokenizers split a text before they look for tokens: at special tokens, and by a rule such as a
regular expression, about where words begin. No token crosses such a split. Three places are safe,
as nothing on one side of them changes how the other side is split: before a special token; after a
single line feed between something visible and a letter or digit; and between two words, before the
one space or sign that parts them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

#: A piece has at least so many characters, or is the last one.
PIECE_CHARACTERS = 8192

_LETTER = r"[^\W\d_]"
_SIGNS = " 。、\uff0c\uff01\uff1f"
_PLACES = (r"(?<=\S)\n(?=[^\W_])", f"(?<={_LETTER})(?=[{_SIGNS}]{_LETTER})")

#: Parts of tokenizer.json that treat a piece as they treat it within its text.
_LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase"}
_LOCAL_SPLITS = {"Split", "Digits", "Punctuation", "Whitespace", "WhitespaceSplit", "ByteLevel"}
#: Settings of an added token that looks at what is beside it.
_LOOKS_AROUND = ("lstrip", "rstrip", "single_word")

#: What is tried on both sides of a cut, before the first one.
_BEFORE = (
    *("word", "A Word", "x1", "12", "12345", "don't", "it'", "end.", "?!", "a -", "(", "```"),
    *("**", '"', "«", "_", "/", "\\", "東京", "né", "ne\u0301", "한", "😀", "^ a", "\tx"),
    *("\u200d", "\u00ad"),
)
_AFTER = (
    *("word", "The x", "s", "ll be", "RE", "7", "1234", "東京", "é", "한국"),
    *("ⅷ", "½", "⑴", "ﬁ", "ǆ"),
)
_WORDS = ("word", "A", "don't", "I'S", "né", "東京", "한", "½", "ⅷ", "ǆ")

Around = tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]
_NOTHING: Around = (np.empty(0, np.int32), np.empty(0, np.int32))


@dataclass(frozen=True, slots=True)
class Pieces:
    """The pieces of a text, in order, and the ids that come before and after theirs.

    `add_special_tokens` holds for every piece: it is True only of a text that stays whole.
    """

    texts: Sequence[str]
    add_special_tokens: bool
    around: Around = _NOTHING


class Cuts:
    """Where texts of one tokenizer may be cut: encode(a + b) is encode(a) and then encode(b).

    Some tokenizers have no such places, such as those that see a text as one word: their texts
    stay whole.
    """

    def __init__(self, tokenizer: Tokenizer, document: Mapping[str, Any]) -> None:
        """`document` is the tokenizer's tokenizer.json."""
        tokens = [
            token["content"]
            for token in document.get("added_tokens") or ()
            if not token.get("normalized", True)
        ]
        special = (f"(?={re.escape(token)})" for token in sorted(tokens))
        self._place = re.compile("|".join((*_PLACES, *special)))
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._is_local = _is_local(document)
        self._around = _around(tokenizer)

    @cached_property
    def _possible(self) -> bool:
        """Whether texts may be cut. Some 40 ms, for the first long text."""
        return (
            self._is_local
            and not _overlap(self._tokens)
            and _has_around(self._tokenizer, self._around)
            and _holds(self._tokenizer, self._tokens)
        )

    def pieces(self, text: str, *, add_special_tokens: bool) -> Pieces:
        """Cuts a text. `add_special_tokens`: as tokenizer.json's post-processor does."""
        if not self._possible:
            return Pieces([text], add_special_tokens)
        around = self._around if add_special_tokens else _NOTHING
        return Pieces(list(self._cut(text)), False, around)

    def _cut(self, text: str) -> Iterator[str]:
        begin = 0
        while found := self._place.search(text, begin + PIECE_CHARACTERS):
            yield text[begin : found.end()]
            begin = found.end()
        yield text[begin:]


def _is_local(document: Mapping[str, Any]) -> bool:
    """Tells whether no part of a tokenizer looks at more than a piece and what splits it."""
    if (document.get("model") or {}).get("dropout"):
        return False
    normalizers, splits = _parts(document, "normalizer"), _parts(document, "pre_tokenizer")
    return (
        all(part.get("type") in _LOCAL_NORMALIZERS for part in normalizers)
        and bool(splits)
        and all(part.get("type") in _LOCAL_SPLITS for part in splits)
        and not any(part.get("add_prefix_space") for part in splits)
        and not any(
            "\n" in token["content"] or any(token.get(field) for field in _LOOKS_AROUND)
            for token in document.get("added_tokens") or ()
        )
    )


def _parts(document: Mapping[str, Any], kind: str) -> list[Mapping[str, Any]]:
    """Returns the normalizers or pre-tokenizers that run one after the other."""
    part = document.get(kind)
    if part is None:
        return []
    plural = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers"}[kind]
    return list(part[plural]) if part.get("type") == "Sequence" else [part]


def _overlap(tokens: Sequence[str]) -> bool:
    """Tells whether a token may begin within an occurrence of another one, or of itself."""
    starts = {token[:length] for token in tokens for length in range(1, len(token) + 1)}
    known, lengths = set(tokens), {len(token) for token in tokens}
    return any(
        token[place:] in starts or any(token[place : place + length] in known for length in lengths)
        for token in tokens
        for place in range(1, len(token))
    )


def _holds(tokenizer: Tokenizer, tokens: Sequence[str]) -> bool:
    """Tries cuts of every kind: both sides are split as they are split together."""
    breaks = [(f"{before}\n", after) for before, after in product(_BEFORE, _AFTER)]
    breaks += [(one, sign + other) for one, sign, other in product(_WORDS, _SIGNS, _WORDS)]
    special = [("the word\n", "The word")]
    special += [
        (before, token + after)
        for token in tokens
        for before, after in (("word", "Word"), ("a. ", " x"), ("x\n\n", "\n"))
    ]
    return all(
        split(f"so {left}") + split(f"{right} on\n") == split(f"so {left}{right} on\n")
        for pairs, split in ((breaks, _splitter(tokenizer)), (special, _encoder(tokenizer)))
        for left, right in pairs
    )


def _splitter(tokenizer: Tokenizer) -> Callable[[str], list[str]]:
    """Returns what cuts a text without special tokens into what no token crosses."""
    normalizer, splits = tokenizer.normalizer, tokenizer.pre_tokenizer

    def split(text: str) -> list[str]:
        normal = text if normalizer is None else normalizer.normalize_str(text)
        return [part for part, _ in splits.pre_tokenize_str(normal)]

    return split


def _encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


def _around(tokenizer: Tokenizer) -> Around:
    """Returns the ids that the post-processor puts before and after a text."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a", add_special_tokens=True).ids
    places = range(len(full) - len(plain) + 1)
    begin = next((place for place in places if full[place : place + len(plain)] == plain), 0)
    first, last = full[:begin], full[begin + len(plain) :]
    return np.array(first, dtype=np.int32), np.array(last, dtype=np.int32)


def _has_around(tokenizer: Tokenizer, around: Around) -> bool:
    """Tells whether a text's ids are those without special tokens, and these ones around them."""
    text = "The mill\n"
    first, last = (ids.tolist() for ids in around)
    plain = tokenizer.encode(text, add_special_tokens=False).ids
    return [*first, *plain, *last] == tokenizer.encode(text, add_special_tokens=True).ids
