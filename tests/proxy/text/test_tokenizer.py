"""The model's own tokenizer.json turns text into ids."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from millrace.bench.gateway.stub_model import stub_tokenizer, write_stub_model
from millrace.core.errors import ModelError
from millrace.proxy.model_card import read_model_card
from millrace.proxy.text.tokenizer import INLINE_CHARACTERS, Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(read_model_card(write_stub_model(tmp_path_factory.mktemp("model"))))


def test_special_tokens_come_from_the_post_processor(tokenizer):
    plain = tokenizer.encode("the mill", add_special_tokens=False)
    assert plain.dtype == np.int32
    assert plain.tolist() == stub_tokenizer().encode("the mill", add_special_tokens=False).ids
    assert tokenizer.encode("the mill", add_special_tokens=True).tolist() == [0, *plain.tolist()]


async def test_long_text_leaves_the_loop_free(tokenizer):
    text = "the mill grinds wheat, rye and barley. " * (40 * INLINE_CHARACTERS // 39)
    longest, stop = 0.0, asyncio.Event()

    async def watch() -> None:
        nonlocal longest
        while not stop.is_set():
            began = time.perf_counter()
            await asyncio.sleep(0)
            longest = max(longest, time.perf_counter() - began)

    watcher = asyncio.create_task(watch())
    began = time.perf_counter()
    ids = await tokenizer.encode_async(text, add_special_tokens=False)
    took = time.perf_counter() - began
    stop.set()
    await watcher
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == text
    assert longest < took  # the loop went round while the thread was at work


def test_damaged_file_is_named(tmp_path):
    card = read_model_card(write_stub_model(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer(card)


def test_token_bytes(tokenizer):
    [euro] = tokenizer.encode("é", add_special_tokens=False).tolist()[:1]
    assert tokenizer.token_bytes(euro) in (b"\xc3", "é".encode())
    assert tokenizer.token_bytes(2) == b"<|user|>"
