"""Incremental detokenising equals decoding the whole, and never shows half a character."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from millrace.bench.gateway.stub_model import stub_tokenizer, write_stub_model
from millrace.proxy.model_card import read_model_card
from millrace.proxy.text.detokenizer import ByteDetokenizer, WindowDetokenizer
from millrace.proxy.text.tokenizer import Tokenizer as ProxyTokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> ProxyTokenizer:
    return ProxyTokenizer(read_model_card(write_stub_model(tmp_path_factory.mktemp("model"))))


RAW = stub_tokenizer()


def joined(detokenizer, ids):
    return "".join([*(detokenizer.feed([i]) for i in ids), detokenizer.flush()])


@given(st.lists(st.integers(0, RAW.get_vocab_size() - 1), max_size=40), st.booleans())
@settings(max_examples=200)
def test_byte_level_equals_whole_decode(tokenizer, ids, skip):
    found = joined(tokenizer.detokenizer(None, skip_special_tokens=skip), ids)
    assert found == RAW.decode(ids, skip_special_tokens=skip)


@given(st.text(max_size=30), st.integers(1, 5))
@settings(max_examples=100)
def test_any_text_comes_back_whatever_the_steps(tokenizer, text, step):
    ids = tokenizer.encode(text, add_special_tokens=False).tolist()
    detokenizer = tokenizer.detokenizer(None, skip_special_tokens=False)
    pieces = [detokenizer.feed(ids[i : i + step]) for i in range(0, len(ids), step)]
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in text
    assert "".join(pieces) + detokenizer.flush() == text


def test_character_of_several_tokens_waits_for_its_last():
    detokenizer = ByteDetokenizer([b"\xf0", b"\x9f", b"\x98", b"\x80"])
    assert [detokenizer.feed([i]) for i in range(4)] == ["", "", "", "😀"]


def test_unfinished_character_ends_as_replacement():
    detokenizer = ByteDetokenizer([b"\xe6\x9d"])
    assert detokenizer.feed([0]) == ""
    assert detokenizer.flush() == "\ufffd"


def sentencepiece_like() -> Tokenizer:
    """A tokenizer with byte fallback and ▁ for spaces, as Llama 2's."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    words += ["▁Hello", "▁world", "!", "▁", "東"]
    tokenizer = Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], byte_fallback=True)
    )
    tokenizer.add_special_tokens(
        [AddedToken("<s>", special=True), AddedToken("</s>", special=True)]
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer


SENTENCEPIECE = sentencepiece_like()


def window(context=()):
    return WindowDetokenizer(lambda ids: SENTENCEPIECE.decode(ids), list(context))


def ids_of(*tokens):
    return [SENTENCEPIECE.token_to_id(token) for token in tokens]


def test_window_keeps_spaces_between_words():
    ids = ids_of("▁Hello", "▁world", "!", "▁", "▁Hello")
    assert joined(window(), ids) == SENTENCEPIECE.decode(ids) == "Hello world!  Hello"


def test_window_after_a_prompt_keeps_the_leading_space():
    assert joined(window(ids_of("▁Hello")), ids_of("▁world")) == " world"


def test_window_waits_for_all_bytes_of_a_character():
    detokenizer = window()
    ids = ids_of("▁Hello", *(f"<0x{b:02X}>" for b in "é東😀".encode()))
    pieces = [detokenizer.feed([i]) for i in ids]
    assert pieces == ["Hello", "", "é", "", "", "東", "", "", "", "😀"]


def test_window_does_not_hold_for_ever():
    detokenizer = window()
    bad = ids_of("<0xFF>")
    assert "".join(detokenizer.feed(bad) for _ in range(64)) != ""


def test_window_skips_special_tokens():
    detokenizer = WindowDetokenizer(lambda ids: SENTENCEPIECE.decode(ids), [])
    ids = ids_of("▁Hello", *["<s>"] * 40, "▁world")
    assert joined(detokenizer, ids) == "Hello world"


@given(st.lists(st.sampled_from(["▁Hello", "▁world", "!", "▁", "東", "</s>"]), max_size=30))
@settings(max_examples=100)
def test_window_equals_whole_decode(tokens):
    ids = ids_of(*tokens)
    assert joined(window(), ids) == SENTENCEPIECE.decode(ids)


def test_tokenizer_without_byte_level_gets_the_window(tmp_path: Path):
    SENTENCEPIECE.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 300, "eos_token_id": 2}))
    tokenizer = ProxyTokenizer(read_model_card(tmp_path))
    assert isinstance(tokenizer.detokenizer(None, skip_special_tokens=True), WindowDetokenizer)
    assert tokenizer.token_bytes(ids_of("<0xE9>")[0]) == b"\xe9"
    assert tokenizer.token_bytes(ids_of("▁world")[0]) == b" world"
    assert tokenizer.token_bytes(299) == b""
