"""Reasons of errors as users read them."""

from pathlib import Path

import pytest

from millrace.core.errors import reason_of


def test_a_reason_has_neither_number_nor_path(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="Errno") as raised:
        (tmp_path / "none").read_bytes()
    assert reason_of(raised.value) == "No such file or directory"


def test_the_number_of_a_repeated_text_goes_too() -> None:
    assert reason_of(ConnectionError("[Errno 111] Connection refused")) == "Connection refused"
    assert reason_of(ValueError("field [Errno 1] x")) == "field [Errno 1] x"
