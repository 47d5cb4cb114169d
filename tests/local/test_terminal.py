"""Output that outlasts its terminal."""

import os
import tty
from pathlib import Path

import pytest

from millrace.local.terminal import lasting


def test_a_closed_terminal_takes_no_more_and_is_no_error() -> None:
    ours, theirs = os.openpty()
    tty.setraw(theirs)
    with os.fdopen(theirs, "w") as plain:
        stream = lasting(plain)
        assert stream.isatty()
        assert stream.fileno() == plain.fileno()
        assert stream.encoding == plain.encoding
        print("first", file=stream)
        assert os.read(ours, 100) == b"first\n"
        os.close(ours)
        with pytest.raises(OSError, match="Input/output error"):
            os.write(theirs, b"second")
        for _ in range(3):
            print("second", file=stream, flush=True)
        stream.close()  # nothing is left to be written
        assert not plain.closed


def test_a_file_stays_as_it_is(tmp_path: Path) -> None:
    with (tmp_path / "output").open("w") as plain:
        assert lasting(plain) is plain


def test_other_errors_are_raised() -> None:
    ours, theirs = os.openpty()
    plain = open(theirs, "w", closefd=False)  # noqa: SIM115
    stream = lasting(plain)
    os.close(theirs)
    with pytest.raises(OSError, match="Bad file descriptor"):
        print("too late", file=stream)
    os.close(ours)
