"""Texts are cut where their pieces have the same tokens as the whole, and nowhere else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable

import pytest
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers, processors

from millrace.proxy.text import cuts as module
from millrace.proxy.text.cuts import PIECE_CHARACTERS, Cuts
from support.small_tokenizers import RULES, SPECIAL, byte_level, small_tokenizer

ATOMS = (
    *("\n", "\n\n", "\r\n", " ", "  ", "\t", " a", "The", "word", "don't", "'s", "'S", "12"),
    *("1234567", ".", "!?", "...", "```", "_", "/", "//", "«", *SPECIAL[1:], "<|im"),
    *("東京", "é", "e\u0301", "\u0301", "한", "\u1161", "😀", "½", "⑴", "ﬁ", "ǆ", "。", "、"),
    *("\uff0c", "\uff01", "\uff1f", "\u200d", "\u00a0", "\u2028", "\x1c", "\x85"),
)


def cuts_of(tokenizer: Tokenizer) -> Cuts:
    return Cuts(tokenizer, json.loads(tokenizer.to_str()))


def ids(tokenizer: Tokenizer, text: str, *, special: bool = False) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=special).ids


def changed(change: Callable[[Tokenizer], None], rule: str = "llama3") -> Tokenizer:
    """Returns a small tokenizer of its own with a change."""
    tokenizer = Tokenizer.from_str(small_tokenizer(rule).to_str())
    change(tokenizer)
    return tokenizer


@pytest.mark.parametrize("rule", RULES)
def test_pieces_have_the_tokens_of_the_whole(rule, monkeypatch):
    monkeypatch.setattr(module, "PIECE_CHARACTERS", 2)
    tokenizer, rng, many = small_tokenizer(rule), random.Random(17), 0
    cuts = cuts_of(tokenizer)
    for _ in range(3000):
        text = "".join(rng.choices(ATOMS, k=rng.randint(1, 30)))
        pieces = cuts.pieces(text, add_special_tokens=False)
        assert "".join(pieces.texts) == text
        found = [i for piece in pieces.texts for i in ids(tokenizer, piece)]
        assert found == ids(tokenizer, text), (text, pieces.texts)
        many += len(pieces.texts) - 1
    assert many > 1000


@pytest.mark.parametrize(
    "line",
    [
        "The mill grinds wheat.\n",
        "the mill grinds wheat and ",
        "東京、京都、大阪",
        "<|im_start|>!!<|im_end|>",
    ],
)
def test_pieces_are_short_and_the_same_after_the_same_beginning(line):
    cuts = cuts_of(small_tokenizer("llama3"))
    text = line * (9 * PIECE_CHARACTERS // (2 * len(line)))
    first = cuts.pieces(text + "The end", add_special_tokens=False).texts
    other = cuts.pieces(text + "Another end of it", add_special_tokens=False).texts
    assert len(first) == len(other) >= 4 and first[:-1] == other[:-1]
    assert all(0 <= len(piece) - PIECE_CHARACTERS <= len(line) for piece in first[:-1])


@pytest.mark.parametrize(
    "text",
    ["", "x" * 3 * PIECE_CHARACTERS, "\n\n" * PIECE_CHARACTERS, "- " * PIECE_CHARACTERS],
)
def test_what_has_no_safe_place_stays_whole(text):
    assert cuts_of(small_tokenizer("gpt2")).pieces(text, add_special_tokens=False).texts == [text]


def spaces_first(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def one_word(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")


def no_splits(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = None


def words_together(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = byte_level(r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]{2,}[\r\n/]*| +(?!\S)")


def lines_together(tokenizer: Tokenizer) -> None:
    tokenizer.pre_tokenizer = byte_level(r"\p{L}+\n\p{L}+|\p{L}+|\s+|[^\s\p{L}]+")


def a_beginning(tokenizer: Tokenizer) -> None:
    tokenizer.normalizer = normalizers.Prepend("_")


def chance(tokenizer: Tokenizer) -> None:
    tokenizer.model.dropout = 0.1


def eats_spaces(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])


def has_a_line_feed(tokenizer: Tokenizer) -> None:
    tokenizer.add_tokens([AddedToken("end\nThe", normalized=False)])


def overlaps(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens(["x<|im", "<|im_end|>x"])


def lies_within(tokenizer: Tokenizer) -> None:
    tokenizer.add_special_tokens([">>y", "y"])


def template(single: str) -> Callable[[Tokenizer], None]:
    def change(tokenizer: Tokenizer) -> None:
        ids = [(token, tokenizer.token_to_id(token)) for token in SPECIAL]
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)

    return change


@pytest.mark.parametrize(
    "change",
    [
        *(spaces_first, one_word, no_splits, words_together, lines_together, a_beginning, chance),
        *(eats_spaces, has_a_line_feed, overlaps, lies_within, template("$A $A")),
    ],
)
def test_texts_of_other_tokenizers_stay_whole(change):
    tokenizer = changed(change)
    text = "The mill grinds wheat.\n" * PIECE_CHARACTERS
    pieces = cuts_of(tokenizer).pieces(text, add_special_tokens=True)
    assert (pieces.texts, pieces.add_special_tokens) == ([text], True)
    assert [around.size for around in pieces.around] == [0, 0]


@pytest.mark.parametrize("single", ["$A", "<|bos|> $A", "$A <|im_end|>", "<|bos|> $A <|im_end|>"])
def test_the_post_processors_tokens_go_around_the_pieces(single):
    tokenizer = changed(template(single))
    text = "The mill grinds wheat.\n" * PIECE_CHARACTERS
    pieces = cuts_of(tokenizer).pieces(text, add_special_tokens=True)
    first, last = (around.tolist() for around in pieces.around)
    found = [i for piece in pieces.texts for i in ids(tokenizer, piece)]
    assert len(pieces.texts) > 2 and not pieces.add_special_tokens
    assert [*first, *found, *last] == ids(tokenizer, text, special=True)
