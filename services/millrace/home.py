"""Paths below a user's home folder, and the folder of temporary files."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from millrace.core.errors import ConfigError, reason_of


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
    return Path(temporary_folder(), f"millrace-{os.getuid()}", *path.parts[1:])


def temporary_folder() -> Path:
    """Returns the folder of temporary files. Raises ConfigError if none can be written to."""
    try:
        return Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ConfigError(
            f"{reason_of(error)}: they are read-only, missing or full. TMPDIR names another folder"
        ) from error
