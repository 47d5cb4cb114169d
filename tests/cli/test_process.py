"""The start and the end of commands' processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from millrace.cli.process import plain_errors, tell
from millrace.core.errors import MillraceError


def test_the_port_is_told_once() -> None:
    read_fd, write_fd = os.pipe()
    tell(write_fd)(8000)
    with os.fdopen(read_fd, "rb") as told:
        assert json.loads(told.read()) == {"port": 8000}


def test_a_port_that_nobody_waits_for_any_more_is_no_error() -> None:
    """The parent is about to end the process. Click would exit silently with status 1."""
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    tell(write_fd)(8000)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(write_fd)


def test_an_error_is_one_line_outside_of_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, plain_errors():
        raise MillraceError("store.url is 'x'")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "millrace: store.url is 'x'\n"


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, which Linux has")
@pytest.mark.parametrize(
    "arguments",
    [
        ("config",),
        *(
            ("sim", "run", "--mix", "qwen", "--rate", "5", "--requests", "3", *more)
            for more in ((), ("--records", "/dev/full"))
        ),
    ],
)
def test_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    with FULL.open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "millrace", *arguments],
            stdout=subprocess.DEVNULL if "--records" in arguments else full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr == "millrace: can't write the output: No space left on device\n"
