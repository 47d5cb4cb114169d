"""The start and the end of commands' processes."""

from __future__ import annotations

import json
import os

import pytest

from millrace.cli.process import tell


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
