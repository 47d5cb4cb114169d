"""What every part of the corpus uses: segments, chats, and the writer that fills the grammar."""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

from tiny_grammar import EXTRA
from tiny_words import SLOTS, SYLLABLE

T = TypeVar("T")
Turn = tuple[str, str]

BOS, EOS, SYSTEM, USER, ASSISTANT, END = (
    "<|bos|>",
    "<|eos|>",
    "<|system|>",
    "<|user|>",
    "<|assistant|>",
    "<|end|>",
)
SPECIAL_TOKENS = (BOS, EOS, SYSTEM, USER, ASSISTANT, END)
USER_WEIGHT = 0.05
_ALL_SLOTS = {**SLOTS, **EXTRA}
_SLOT = re.compile(r"\{(\w+)\}")
_ARTICLE = re.compile(r"\b([Aa])\(n\) (hon|\w)")
_SENTENCE = re.compile(r'((?:^|[.!?] |\." )"?)([a-z])')


@dataclasses.dataclass(frozen=True, slots=True)
class Segment:
    """Text with its weight in the loss (0 to 1)."""

    text: str
    weight: float


Document = list[Segment]


def pick(rng: random.Random, items: Sequence[T]) -> T:
    return items[rng.randrange(len(items))]


def a_or_an(text: str) -> str:
    """Turn every `a(n)` into the article that fits the next letter."""
    return _ARTICLE.sub(
        lambda m: m[1] + ("n " if m[2][0].lower() in "aeio" or m[2] == "hon" else " ") + m[2],
        text,
    )


def fill(rng: random.Random, template: str, bound: Mapping[str, str | Sequence[str]]) -> str:
    """Fill every slot: from `bound` (a text, or one of several), else from the word lists."""

    def one(match: re.Match[str]) -> str:
        value: str | Sequence[str] = bound.get(match[1]) or _ALL_SLOTS[match[1]]
        return value if isinstance(value, str) else pick(rng, value)

    while "{" in template:
        template = _SLOT.sub(one, template)
    return a_or_an(template)


def sentence_case(text: str) -> str:
    """Capital letters at the start of the text and after every full stop."""
    return _SENTENCE.sub(lambda m: m[1] + m[2].upper(), text)


def write(
    rng: random.Random, template: str, bound: Mapping[str, str | Sequence[str]] | None = None
) -> str:
    """One filled sentence (or a few), with capital letters."""
    return sentence_case(fill(rng, template, bound or {}))


def case(rng: random.Random, text: str) -> str:
    """As people type: mostly with a capital letter and a full stop, sometimes without."""
    roll = rng.random()
    text = a_or_an(text)
    if roll < 0.2:
        return text.rstrip(".")
    text = text[0].upper() + text[1:]
    return text.rstrip(".") if roll < 0.35 else text


def gibberish(rng: random.Random, words: int) -> str:
    """Made-up words, so that the model meets some that it has never seen."""
    return " ".join(
        "".join(pick(rng, SYLLABLE) for _ in range(rng.randint(1, 3))) for _ in range(words)
    )


def chat(turns: Sequence[Turn], *, system: str | None = None) -> Document:
    """The document that the model's chat template renders for these turns."""
    document = [Segment(BOS, 0.0)]
    if system is not None:
        document.append(Segment(SYSTEM + system + END, USER_WEIGHT))
    for question, answer in turns:
        document.append(Segment(USER + question + END, USER_WEIGHT))
        document.append(Segment(ASSISTANT, 0.0))
        document.append(Segment(answer + END, 1.0))
    document.append(Segment(EOS, 1.0))
    return document
