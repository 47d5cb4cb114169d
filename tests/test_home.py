"""Paths below a home folder, which a user may not have."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from millrace.core.errors import ConfigError
from millrace.home import expanded, of_user, temporary_folder


def test_a_home_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert expanded("~/models/a") == Path("/home/me/models/a")
    assert of_user("~/.cache/a") == Path("/home/me/.cache/a")


def test_a_user_whom_nobody_knows_is_a_name_like_others() -> None:
    assert expanded("~nobody-of-this-name/a") == Path("~nobody-of-this-name/a")


def test_without_a_home_the_folder_of_temporary_files_serves(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert of_user("~/.cache/a") == tmp_path / f"millrace-{os.getuid()}/.cache/a"


def test_no_folder_of_temporary_files_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file in it can be made: it is read-only, or its disk is full."""

    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match=r"No usable temporary directory .*TMPDIR names another"):
        temporary_folder()
