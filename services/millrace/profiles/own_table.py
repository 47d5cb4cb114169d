"""Builds a profile from a table of prefill times that were measured elsewhere.

Tetris section 5.1 fits Eq. (1) for each SP degree to latencies at various (C, L). Here the table is
a CSV file; all that it does not say comes from a profile of the same model.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from millrace.core.cost.latency import Latency, SpLatency
from millrace.core.cost.operators import OPERATORS, BatchShape, OperatorModel, Table
from millrace.core.cost.profile import Profile
from millrace.core.errors import ConfigError, reason_of
from millrace.profiles import eq_1
from millrace.profiles.degrees import estimated

#: The columns, and the values of those that a table may leave out.
COLUMNS = ("tokens", "seconds", "history", "sp")
ABSENT = MappingProxyType({"history": "0", "sp": "1"})

#: (tokens, history) -> seconds.
Times = Mapping[tuple[int, int], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A chunk of `tokens` after `history` tokens took `seconds` on a group of `sp`."""

    tokens: int
    history: int
    sp: int
    seconds: float


def read_table(path: Path) -> dict[int, Times]:
    """Reads a table: the median of equal cases, by SP degree. Raises ConfigError."""
    found: dict[int, dict[tuple[int, int], list[float]]] = {}
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            for row in _rows(path, csv.DictReader(file)):
                found.setdefault(row.sp, {}).setdefault((row.tokens, row.history), []).append(
                    row.seconds
                )
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"table {path}: {reason_of(error)}") from error
    for sp in {1} | found.keys():
        if not any(not history for _, history in found.get(sp, ())):
            raise ConfigError(f"table {path}: sp {sp} has no row without history; it needs one")
    return {
        sp: {case: median(seconds) for case, seconds in cases.items()}
        for sp, cases in sorted(found.items())
    }


def _rows(path: Path, reader: csv.DictReader[str]) -> Iterator[Row]:
    columns = set(reader.fieldnames or ())
    if not {"tokens", "seconds"} <= columns <= set(COLUMNS):
        raise ConfigError(
            f"table {path}, line 1: the columns are {', '.join(reader.fieldnames or ()) or 'none'};"
            " they must be tokens, seconds and, where they differ from 0 and 1, history and sp"
        )
    for entry in reader:
        where = f"table {path}, line {reader.line_num}"
        values = {**ABSENT, **entry}
        yield Row(
            **{name: _whole(values[name], name, where) for name in ("tokens", "history", "sp")},
            seconds=_seconds(values["seconds"], where),
        )


def _whole(text: str | None, name: str, where: str) -> int:
    least = 0 if name == "history" else 1
    try:
        value = int(text or "")
    except ValueError:
        value = -1
    if value < least:
        raise ConfigError(f"{where}: {name} is {text!r}; it must be a whole number from {least} on")
    return value


def _seconds(text: str | None, where: str) -> float:
    try:
        seconds = float(text or "")
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds < math.inf:
        raise ConfigError(f"{where}: seconds is {text!r}; it must be a number above 0")
    return seconds


def fitted(times: Mapping[int, Times], like: Profile, name: str) -> Profile:
    """Returns `like` with the prefill times of a table, by SP degree.

    Degrees that the table lacks follow from degree 1 by the ring model. The operators are those of
    `like`, all scaled by the median ratio of the measured times to theirs.
    """
    measured = {sp: _latency(cases) for sp, cases in times.items()}
    operators, mixed = like.operators, like.mixed
    ratio = median(
        seconds / operators.pass_s(BatchShape(prefills=((tokens, 0),)))
        for (tokens, history), seconds in times[1].items()
        if not history
    )
    found = replace(
        like,
        name=name,
        prefill=SpLatency(by_sp=MappingProxyType(estimated(measured[1], like.layers) | measured)),
        operators=_scaled(operators, ratio),
        mixed=None if mixed is None else _scaled(mixed, ratio),
        measured_sp=tuple(sp for sp in measured if sp > 1),
        sources=("prefill: a table of measured times", f"everything else: {like.name}"),
        checks=MappingProxyType({}),
        assumptions=(
            f"operators of {like.name}, times {ratio:.3g}",
            "SP degrees that the table lacks by the ring model",
        ),
    )
    return replace(found, errors=MappingProxyType(_errors(found.prefill, times)))


def _latency(cases: Times) -> Latency:
    """Fits Eq. (1), with a point for each length without history."""
    alone = sorted((tokens, s) for (tokens, history), s in cases.items() if not history)
    seconds = eq_1.rising([s for _, s in alone])
    points = tuple((t, eq_1.rounded(s)) for (t, _), s in zip(alone, seconds, strict=True))
    bare = replace(eq_1.latency(*eq_1.fit(points), points), c=0.0)
    more = [(t, h, s - bare.chunk_s(t)) for (t, h), s in sorted(cases.items()) if h]
    return replace(bare, c=eq_1.rounded(eq_1.history_term(bare, more)))


def _errors(prefill: SpLatency, times: Mapping[int, Times]) -> dict[str, float]:
    """Returns the median relative error of Eq. (1) after histories, by degree."""
    return {
        f"sp{sp}_history": eq_1.rounded(
            median(
                abs(prefill.chunk_s(tokens, history, sp) / seconds - 1.0)
                for (tokens, history), seconds in cases.items()
                if history
            )
        )
        for sp, cases in times.items()
        if any(history for _, history in cases)
    }


def _scaled(model: OperatorModel, ratio: float) -> OperatorModel:
    """Returns a model all of whose times are `ratio` times as long."""
    decode = model.decode_attn
    scaled: dict[str, Any] = {
        name: _table(getattr(model, name), ratio) for name in (*OPERATORS, "lm_head")
    }
    for name in ("kv_read_s", "overhead_s", "attn_call_s"):
        scaled[name] = eq_1.rounded(ratio * getattr(model, name))
    tables = tuple(_table(table, ratio) for table in decode.tables)
    return replace(model, decode_attn=replace(decode, tables=tables), **scaled)


def _table(table: Table, ratio: float) -> Table:
    return Table(xs=table.xs, ys=tuple(eq_1.rounded(ratio * y) for y in table.ys))
