"""Paths below a user's home folder."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def expanded(path: str | Path) -> Path:
    """Returns the path with `~` as the home folder; unchanged if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def of_user(folder: str) -> Path:
    """Returns a folder below `~`, for what a user keeps. A user without a home has it below the
    folder of temporary files: containers run as user ids that the machine does not know.
    """
    path = expanded(folder)
    if path.parts[0] != "~":
        return path
    return Path(tempfile.gettempdir(), f"millrace-{os.getuid()}", *path.parts[1:])
