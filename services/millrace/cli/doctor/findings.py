"""What `millrace doctor` finds, and how it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console

OK, WARNING, FAILURE = "ok", "warning", "failure"
_STYLES = {OK: "green", WARNING: "yellow", FAILURE: "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One check: what it is about, how it went, and what to do if not well."""

    level: str
    subject: str
    text: str
    advice: str = ""


def show(findings: Sequence[Finding], console: Console) -> None:
    """Prints a line for each finding, with its advice below it, and their number by level."""
    for one in findings:
        console.print(f"[{_STYLES[one.level]}]{one.level:8}[/] ", end="")
        console.print(f"{one.subject}: {one.text}", markup=False, highlight=False, soft_wrap=True)
        if one.advice:
            console.print(
                f"         do: {one.advice}", markup=False, highlight=False, soft_wrap=True
            )
    counts = ", ".join(
        f"{sum(one.level == level for one in findings)} {level}" for level in _STYLES
    )
    console.print(counts, highlight=False)
