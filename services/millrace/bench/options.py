"""Options that several benchmarks read alike."""

from __future__ import annotations

from collections.abc import Sequence

import typer


def names(text: str, known: Sequence[str]) -> list[str]:
    """Comma-separated names, each once. Raises BadParameter for one that is not `known`."""
    found = [part.strip() for part in text.split(",")]
    if unknown := sorted(set(found) - set(known)):
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(known)}")
    return list(dict.fromkeys(found))
