"""Options that several benchmarks read alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import typer
from rich.console import Console


def names(text: str, known: Sequence[str]) -> list[str]:
    """Comma-separated names, each once. Raises BadParameter for one that is not `known`."""
    found = [part.strip() for part in text.split(",")]
    if unknown := sorted(set(found) - set(known)):
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(known)}")
    return list(dict.fromkeys(found))


def progress_lines(console: Console) -> Callable[[str], None]:
    """Where there is no terminal: a line whenever something else begins, without its seconds."""
    last = ""

    def told(what: str) -> None:
        nonlocal last
        begun = what.partition(" (")[0]
        if begun != last:
            last = begun
            console.print(begun)

    return told
