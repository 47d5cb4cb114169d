"""Long texts have the tokenizer's ids, and only what is new in them is tokenised."""

from __future__ import annotations

import asyncio
import json
import os
import signal

import psutil
import pytest

from millrace.bench.gateway.stub_model import write_stub_model
from millrace.proxy.text import long_texts as module
from millrace.proxy.text.cuts import PIECE_CHARACTERS, Cuts
from millrace.proxy.text.encoder_process import ids_of
from millrace.proxy.text.long_texts import LongTexts
from support.deadlines import HANG_S
from support.small_tokenizers import small_tokenizer

LINES = [f"Line {number} of the mill: wheels turn, Zürich, 東京 😀.\n" for number in range(2000)]
TEXT = "".join(LINES)
TOKENIZER = small_tokenizer("llama3")


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    found = tmp_path_factory.mktemp("model") / "tokenizer.json"
    TOKENIZER.save(str(found))
    return found


@pytest.fixture
def texts(path):
    made = LongTexts(TOKENIZER, Cuts(TOKENIZER, json.loads(path.read_text())), path)
    yield made
    made.close()


@pytest.fixture
def encoded(monkeypatch):
    """The texts that are tokenised in this process from now on."""
    found = []

    def spy(tokenizer, texts, *, add_special_tokens):
        found.extend(texts)
        return ids_of(tokenizer, texts, add_special_tokens=add_special_tokens)

    monkeypatch.setattr(module, "ids_of", spy)
    return found


async def ids(texts, text, *, special=False, salt=""):
    found = await texts.encode(text, add_special_tokens=special, salt=salt)
    assert found.tolist() == TOKENIZER.encode(text, add_special_tokens=special).ids
    return found


def children() -> set[int]:
    return {child.pid for child in psutil.Process().children()}


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("beside", [False, True])
async def test_the_ids_are_those_of_the_tokenizer(texts, monkeypatch, special, beside):
    monkeypatch.setattr(module, "THREAD_CHARACTERS", 0 if beside else 1 << 30)
    monkeypatch.setattr(module, "GROUP_CHARACTERS", 3 * PIECE_CHARACTERS)
    before = children()
    await ids(texts, TEXT, special=special)
    await ids(texts, TEXT[: len(TEXT) // 2], special=special)
    await ids(texts, "x" * 5 * PIECE_CHARACTERS, special=special)
    assert len(children() - before) == beside


async def test_only_what_is_new_is_tokenised(texts, encoded):
    await ids(texts, TEXT)
    assert "".join(encoded) == TEXT
    encoded.clear()
    await ids(texts, TEXT + "What does it mean?")
    await ids(texts, TEXT + "What does it mean?")
    assert len(encoded) == 1 and encoded[0].endswith("What does it mean?")
    assert len(encoded[0]) < PIECE_CHARACTERS + 100
    encoded.clear()
    await ids(texts, TEXT.replace(" 999 ", " 999! "))
    assert any("Line 999! of" in piece for piece in encoded)
    assert len("".join(encoded)) < 3 * PIECE_CHARACTERS


async def test_salts_share_no_work(texts, encoded):
    for salt in ("", "one", "two"):
        encoded.clear()
        await ids(texts, TEXT, salt=salt)
        assert "".join(encoded) == TEXT
        encoded.clear()
        await ids(texts, TEXT, salt=salt)
        assert not encoded


async def test_a_text_comes_between_the_groups_of_longer_ones(texts, monkeypatch):
    monkeypatch.setattr(module, "THREAD_CHARACTERS", PIECE_CHARACTERS)
    monkeypatch.setattr(module, "GROUP_CHARACTERS", PIECE_CHARACTERS)
    longer = [asyncio.create_task(ids(texts, f"{name} {TEXT * 8}")) for name in "abc"]
    await asyncio.wait_for(ids(texts, TEXT[: 2 * PIECE_CHARACTERS]), HANG_S)
    assert not any(task.done() for task in longer)
    await asyncio.wait_for(asyncio.gather(*longer), HANG_S)


async def test_after_the_death_of_a_process_texts_are_tokenised_here(
    texts, monkeypatch, encoded, caplog
):
    monkeypatch.setattr(module, "THREAD_CHARACTERS", 0)
    monkeypatch.setattr(module, "GROUP_CHARACTERS", 3 * PIECE_CHARACTERS)
    before = children()
    await ids(texts, TEXT)
    (first,) = children() - before
    assert not encoded
    os.kill(first, signal.SIGKILL)
    psutil.Process(first).wait()
    await ids(texts, TEXT.replace("mill", "race"))
    assert "tokenises" in caplog.text and "in the proxy" in caplog.text
    assert 0 < len("".join(encoded)) <= module.GROUP_CHARACTERS  # one group; then a new process
    (second,) = children() - before
    await asyncio.gather(*(ids(texts, TEXT.replace("mill", name)) for name in "abcd"))
    assert second in children() and len(children() - before) <= 2
    texts.close()
    assert children() == before


async def test_the_next_texts_find_a_process_that_has_ended(tmp_path):
    """As of a tokenizer of another kind, whose texts stay whole."""
    folder = write_stub_model(tmp_path)
    path = folder / "tokenizer.json"
    document = json.loads(path.read_text()) | {"pre_tokenizer": None}
    path.write_text(json.dumps(document))
    tokenizer = type(TOKENIZER).from_file(str(path))
    texts = LongTexts(tokenizer, Cuts(tokenizer, document), path)
    for special in (True, False):
        found = await texts.encode(TEXT[:20_000], add_special_tokens=special, salt="")
        assert found.tolist() == tokenizer.encode(TEXT[:20_000], add_special_tokens=special).ids
    texts.close()
