"""The command lines of manifests, as `millrace` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from millrace.cli.main import app

MOUNTED = "/etc/millrace/config.toml"


def read_arguments(args: Sequence[str], folder: Path) -> tuple[str, dict[str, Any]]:
    """Returns the command and its options, with a file in the place of the mounted one."""
    command, *words = args
    file = folder / "config.toml"
    assert words.count(MOUNTED) == 1
    file.touch()
    words = [str(file) if one == MOUNTED else one for one in words]
    given = typer.main.get_command(app).commands[command].make_context(command, words).params  # type: ignore[attr-defined]
    assert given["config"] == file
    return command, given
