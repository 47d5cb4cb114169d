"""A model's small files that anybody may have written: a ModelError, or a tokenizer that works."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace.core.errors import ModelError
from millrace.proxy.model_card import read_model_card
from millrace.proxy.text.tokenizer import Tokenizer
from millrace.shipped import SHIPPED_MODEL
from support.damaged_json import damaged

FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")
DOCUMENTS = {name: json.loads((SHIPPED_MODEL / name).read_text()) for name in FILES}
TEXT = "Some words, 12 \u00e4\u4e2d"


def read(name: str, content: bytes) -> None:
    """Reads a model whose file `name` has this content, and uses its tokenizer."""
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for other in FILES:
            shutil.copy(SHIPPED_MODEL / other, folder)
        (folder / name).write_bytes(content)
        try:
            card = read_model_card(folder)
            tokenizer = Tokenizer(card)
        except ModelError as error:
            assert made in str(error)
            return
        ids = tokenizer.encode(TEXT, add_special_tokens=True)
        assert isinstance(tokenizer.decode(ids.tolist(), skip_special_tokens=True), str)
        tokenizer.close()


def test_whole_files_are_read() -> None:
    for name in FILES:
        read(name, (SHIPPED_MODEL / name).read_bytes())


@pytest.mark.parametrize("name", FILES)
@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_value_in_any_place(name: str, data: st.DataObject) -> None:
    read(name, json.dumps(data.draw(damaged(DOCUMENTS[name]))).encode())


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "content", [b"", b"\xff\xfe", b"{", b"[]", b"null", b"[" * 100_000, b"{" * 100_000]
)
def test_other_bytes(name: str, content: bytes) -> None:
    read(name, content)
