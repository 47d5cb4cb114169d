"""Long texts are tokenised in a process: to the same ids, whatever happens to the process."""

from __future__ import annotations

import asyncio
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from millrace.bench.gateway.stub_model import write_stub_model
from millrace.proxy.model_card import read_model_card
from millrace.proxy.text.encoder_process import EncoderProcess
from millrace.proxy.text.tokenizer import Tokenizer
from support.live_stack import eventually

TEXT = "Rivers turn wheels. Zürich, naïve café, 東京, 😀 <|user|> " * 200


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_stub_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def tokenizer(folder):
    made = Tokenizer(read_model_card(folder))
    yield made
    made.close()


@pytest.fixture
def process(folder):
    made = EncoderProcess(folder / "tokenizer.json")
    yield made
    made.close()


def killed(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    psutil.Process(pid).wait()


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("text", ["", "a", TEXT])
def test_the_ids_are_those_of_the_tokenizer(tokenizer, process, text, special):
    expected = tokenizer.encode(text, add_special_tokens=special)
    [found] = process.encode([text], add_special_tokens=special)
    assert found.dtype == expected.dtype and found.tolist() == expected.tolist()


def test_one_process_serves_all_texts_and_ends_with_its_owner(process):
    assert process.pid is None  # before the first text
    process.encode([TEXT], add_special_tokens=False)
    first = process.pid
    process.encode(["a"], add_special_tokens=True)
    assert process.pid == first
    process.close()
    assert process.pid is None and not psutil.pid_exists(first)


def test_after_its_death_the_next_text_gets_a_new_process(process):
    process.encode(["a"], add_special_tokens=False)
    first = process.pid
    killed(first)
    with pytest.raises(OSError, match=r"process has ended|Broken pipe"):
        process.encode([TEXT], add_special_tokens=False)
    assert process.encode(["a"], add_special_tokens=False)[0].size == 1
    assert process.pid not in (None, first)


async def test_a_process_without_work_ends(folder):
    process = EncoderProcess(folder / "tokenizer.json", idle_s=0.0)
    await asyncio.to_thread(process.encode, ["a"], add_special_tokens=False)
    await eventually(lambda: process.pid is None)
    assert process.encode(["a"], add_special_tokens=False)[0].size == 1
    process.close()


def test_a_tokenizer_that_can_not_be_read_is_an_error(tmp_path):
    process = EncoderProcess(tmp_path / "tokenizer.json")
    with pytest.raises(OSError, match=r"process has ended|Broken pipe"):
        process.encode(["a"], add_special_tokens=False)
    process.close()


def test_texts_of_several_threads_keep_apart(process):
    texts = [f"{number} wheels " * 50 for number in range(20)]
    expected = [ids.tolist() for ids in process.encode(texts, add_special_tokens=False)]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda text: process.encode([text], add_special_tokens=False), texts)
        assert [ids.tolist() for [ids] in found] == expected
