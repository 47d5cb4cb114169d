"""Tables described as data: the headings, a template of a row, and the rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from string import Formatter
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

#: Units that a format may begin with: the factor from the value's unit.
_UNITS = {"us": 1e6, "ms": 1e3, "%": 1e2, "GB": 1e-9, "MiB": 2.0**-20}
#: The most characters that a column keeps on one line in a narrow terminal.
_MOST_MIN = 48
_FORMAT = re.compile(r"(us|ms|%(?!$)|GB|MiB)?(.*)")


class Output(Console):
    """Standard output. A table that is wider than the terminal sticks out of it.

    rich would cut its lines, and a number without its last digits looks like a number.
    """

    def print(self, *objects: Any, **options: Any) -> None:  # noqa: ANN401 - rich's options
        super().print(*objects, **{"crop": False} | options)


class _Template(Formatter):
    """Formats as `str.format` does, with units and absent values."""

    def get_value(self, key: int | str, args: Any, kwargs: Mapping[str, Any]) -> Any:  # noqa: ANN401
        name = str(key)
        return kwargs.get(name[:-1]) if name.endswith("?") else kwargs[name]

    def format_field(self, value: Any, format_spec: str) -> str:  # noqa: ANN401
        return as_text(value, format_spec)


def as_text(value: Any, form: str) -> str:  # noqa: ANN401
    """Returns a value in a cell's format."""
    if value is None:
        return ""
    unit, rest = _FORMAT.fullmatch(form).groups()  # type: ignore[union-attr] # any text matches
    return format(value * _UNITS[unit] if unit else value, rest)


def table(
    title: str,
    headings: str,
    template: str,
    rows: Iterable[Mapping[str, Any]],
    *,
    left: int = 0,
    caption: str = "",
    tight: bool = False,
) -> Table:
    """Makes a table of rows, whose `left` first columns are flush left, others flush right.
    One space is between columns of a `tight` table, else two.

    headings: with " | " between. template: the cells with " | " between, each text with fields as
    in `str.format`. A format may begin with a unit: `{wait_s:ms.1f}` shows milliseconds, `us`,
    `GB`, `MiB` and `%` likewise (`{share:%.0f}` without the sign, `{share:.0%}` with it). A value
    that is None makes an empty text, as does an absent one whose name ends in a question mark.
    """
    made = Table(
        title=title,
        caption=caption or None,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0 if tight else 1, 0, 0),
        pad_edge=False,
    )
    formatter, cells = _Template(), template.split(" | ")
    shown = [[formatter.vformat(cell, (), row) for cell in cells] for row in rows]
    for number, heading in enumerate(headings.split(" | ")):
        words = heading.split()
        if number < left:  # names stay on one line
            words += [row[number] for row in shown]
        made.add_column(
            heading,
            justify="left" if number < left else "right",
            overflow="fold",  # where there is no room, lines break, and nothing is left out
            min_width=min(_MOST_MIN, max(map(len, words), default=0)),
        )
    for row in shown:
        made.add_row(*row)
    return made


def judged(value: float, good: bool, as_text: str = ".2f") -> str:
    """Returns the value as text in green, or in red."""
    return f"[{'green' if good else 'red'}]{value:{as_text}}[/]"
