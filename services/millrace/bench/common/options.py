"""Options that several benchmarks have in common."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from millrace.core.errors import MillraceError

if TYPE_CHECKING:
    from rich.console import Console

Document = dict[str, Any]


def names(text: str, known: Sequence[str]) -> list[str]:
    """Returns comma-separated names without repeats. Raises BadParameter for an unknown name."""
    found = [part.strip() for part in text.split(",")]
    if unknown := sorted(set(found) - set(known)):
        raise typer.BadParameter(f"{unknown[0]!r} is not one of {', '.join(known)}")
    return list(dict.fromkeys(found))


def numbers(text: str, option: str) -> tuple[int, ...]:
    """Returns ascending whole numbers above 0. Raises BadParameter."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise typer.BadParameter(f"{option} {text!r}: write whole numbers with commas between")
    return tuple(sorted({int(part) for part in parts}))


def progress_lines(console: Console) -> Callable[[str], None]:
    """Prints progress without a terminal: a line whenever another step begins, without its
    seconds.
    """
    last = ""

    def told(what: str) -> None:
        nonlocal last
        begun = what.partition(" (")[0]
        if begun != last:
            last = begun
            console.print(begun)

    return told


def measure(
    run: Callable[[Callable[[str], None]], Coroutine[Any, Any, Document]],
    print_tables: Callable[[Document, Console], None],
    draw: Callable[[Document, Path], None],
    json_path: Path | None,
    plot: Path | None,
) -> None:
    """Runs a benchmark with a progress callback, then shows and stores its report.

    Raises BadParameter, before it begins, for a file in a missing folder.
    """
    import uvloop
    from rich.console import Console

    for path in (json_path, plot):
        if path is not None and not path.parent.is_dir():
            raise typer.BadParameter(f"{path}: there is no folder {path.parent}")
    console = Console(stderr=True)
    with console.status("starting") as status:
        progress = status.update if console.is_terminal else progress_lines(console)
        try:
            document = uvloop.run(run(progress))
        except MillraceError as error:
            console.print(f"millrace: {error}", markup=False)
            raise typer.Exit(1) from None
    print_tables(document, Console())
    if json_path is not None:
        json_path.write_text(json.dumps(document, indent=2) + "\n")
    if plot is not None:
        draw(document, plot)
