"""The requests of a load test or a simulation: lengths, arrivals and classes from one seed.

Trace files, plain or gzip, are told apart by their first line:

- Azure LLM inference: CSV with TIMESTAMP, ContextTokens, GeneratedTokens;
- Mooncake: JSON lines with timestamp (ms), input_length, output_length;
- QwenTrace (Qwen-Bailian): JSON lines with chat_id, parent_chat_id, timestamp (s), input_length,
  output_length, type, hash_ids; made single-turn as FlowPrefill (section 6.1, "Workloads") does;
- Vidur and Sarathi: CSV with num_prefill_tokens, num_decode_tokens, and arrived_at (s) or no times.

Prefix blocks (hash_ids) have no other use: every request is a single turn with a cold cache.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

from millrace.core.errors import ConfigError, reason_of
from millrace.core.weights import DEFAULT_TENANT
from millrace.sim.workload.arrivals import Gaps

Draw = Callable[[random.Random], int]

_QWEN_BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace; `arrival_s` counts from the first request, None where there are no
    times.

    `class_name` is empty where the trace does not tell kinds of request apart.
    """

    arrival_s: float | None
    input_tokens: int
    output_tokens: int
    class_name: str = ""


RowDraw = Callable[[random.Random], TraceRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClass:
    """Objectives in seconds, None where there is none; `weight` is the class's share of traffic."""

    name: str
    ttft_s: float | None = None
    tbt_s: float | None = None
    e2e_s: float | None = None
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> SloClass:
        """Reads name:ttft_ms:tbt_ms[:weight[:e2e_ms]]; 0 ms: no objective. Raises ConfigError."""
        name, *rest = text.split(":")
        try:
            numbers = [float(part) for part in rest]
        except ValueError:
            numbers = []
        valid = len(numbers) in (2, 3, 4) and all(0 <= n < math.inf for n in numbers)
        if not name or not valid or (len(numbers) > 2 and numbers[2] == 0):
            raise ConfigError(
                f"--slo-class {text!r}: write it as name:ttft_ms:tbt_ms[:weight[:e2e_ms]], "
                "numbers >= 0"
            )
        return cls(
            name=name,
            ttft_s=numbers[0] / 1e3 or None,
            tbt_s=numbers[1] / 1e3 or None,
            e2e_s=numbers[3] / 1e3 or None if len(numbers) > 3 else None,
            weight=numbers[2] if len(numbers) > 2 else 1.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request to send: `arrival_s` after the start; 0 throughout when a free slot decides."""

    index: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    slo: SloClass
    tenant: str = DEFAULT_TENANT


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """How to draw a workload. Without `rate_rps`, arrivals are the trace's, or left open; with it
    they are Poisson, or have `gaps` in units of the mean gap.

    Rows come from `trace`, or one by one from `draw_row`. A row's class is the class of `classes`
    with its name (a class without objectives when there is none); rows without a name draw theirs
    by weight.
    """

    trace: Sequence[TraceRow] = ()
    draw_row: RowDraw | None = None
    rate_rps: float | None = None
    gaps: Gaps | None = None
    open_arrivals: bool = False  # send whenever a slot is free, even if the trace has times
    rate_scale: float = 1.0
    input_tokens: Draw | None = None  # None: the trace's
    output_tokens: Draw | None = None
    max_input_tokens: int | None = None  # longer ones are cut to this
    max_output_tokens: int | None = None
    classes: Sequence[SloClass] = (SloClass(name="default"),)
    requests: int | None = None
    duration_s: float | None = None
    seed: int = 0


def parse_lengths(text: str, option: str) -> Draw:
    """Parses a length distribution in tokens: `N`, `LOW:HIGH` (uniform) or `lognormal:MEAN:STD`.

    MEAN and STD are those of the lengths themselves. Raises ConfigError naming `option`.
    """
    parts = text.split(":")
    try:
        if parts[0] == "lognormal" and len(parts) == 3:
            return lognormal(float(parts[1]), float(parts[2]))
        low, high = int(parts[0]), int(parts[-1])
        if 1 <= low <= high and len(parts) <= 2:
            return lambda rng: rng.randint(low, high)
    except ValueError:
        pass
    raise ConfigError(
        f"{option} {text!r}: write N, LOW:HIGH or lognormal:MEAN:STD, in tokens, at least 1"
    )


def lognormal(mean: float, std: float) -> Draw:
    """Draws lognormal lengths in tokens by their own mean and standard deviation."""
    if not (1 <= mean < math.inf and 0 <= std < math.inf):
        raise ValueError
    sigma_squared = math.log1p((std / mean) ** 2)
    mu, sigma = math.log(mean) - sigma_squared / 2, math.sqrt(sigma_squared)
    return lambda rng: max(1, round(rng.lognormvariate(mu, sigma)))


def read_trace(path: Path) -> list[TraceRow]:
    """Reads a trace, ordered by arrival. Raises ConfigError for a file that is no trace."""
    try:
        with path.open("rb") as probe:
            packed = probe.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rt") if packed else path.open() as lines:
            rows = list(_rows(lines))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path}: {reason_of(error)}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"trace {path}: not a trace this command knows ({error})") from error
    if not rows:
        raise ConfigError(f"trace {path}: holds no requests")
    if rows[0].arrival_s is None:
        return rows
    rows.sort(key=_arrival_s)
    return _from(rows, _arrival_s(rows[0]))


def cut_window(rows: Sequence[TraceRow], start_s: float, end_s: float) -> list[TraceRow]:
    """The rows that arrive from `start_s` to `end_s`, both included; arrivals count from `start_s`.

    Raises ConfigError when the trace has no times, or none in the window.
    """
    found = [row for row in rows if start_s <= _arrival_s(row) <= end_s]
    if not found or found[0].arrival_s is None:
        raise ConfigError(
            f"--window {start_s:g}:{end_s:g}: no request of the trace arrives in it, in seconds"
        )
    return _from(found, start_s)


def _from(rows: Iterable[TraceRow], start_s: float) -> list[TraceRow]:
    return [replace(row, arrival_s=_arrival_s(row) - start_s) for row in rows]


def _arrival_s(row: TraceRow) -> float:
    return row.arrival_s or 0.0


def _rows(lines: Iterable[str]) -> Iterator[TraceRow]:
    stream = iter(lines)
    first = next(stream, "")
    if first.startswith("{"):
        entries = map(json.loads, filter(str.strip, itertools.chain([first], stream)))
        yield from _qwen_rows(entries) if '"chat_id"' in first else _mooncake_rows(entries)
        return
    for entry in csv.DictReader(itertools.chain([first], stream)):
        if "TIMESTAMP" in entry:
            arrival = datetime.fromisoformat(entry["TIMESTAMP"])
            seconds = (arrival - datetime(1970, 1, 1)).total_seconds()
            yield _row(seconds, entry["ContextTokens"], entry["GeneratedTokens"])
        else:
            arrived = entry.get("arrived_at")
            yield _row(
                None if arrived is None else float(arrived),
                entry["num_prefill_tokens"],
                entry["num_decode_tokens"],
            )


def _mooncake_rows(entries: Iterable[dict[str, Any]]) -> Iterator[TraceRow]:
    for entry in entries:
        yield _row(entry["timestamp"] / 1e3, entry["input_length"], entry["output_length"])


def _qwen_rows(entries: Iterable[dict[str, Any]]) -> Iterator[TraceRow]:
    """Reads a QwenTrace.

    A text turn of a chat keeps only the blocks that its parent's prompt lacked.

    Turns of the other types, and turns whose parent is not in the file, stay whole.
    """
    blocks: dict[int, int] = {}  # of each chat_id
    for entry in entries:
        own = blocks[entry["chat_id"]] = len(entry["hash_ids"])
        parent = blocks.get(entry["parent_chat_id"])
        tokens = entry["input_length"]
        if entry["type"] == "text" and parent is not None:
            tokens = _QWEN_BLOCK_TOKENS * (own - parent)
        yield _row(float(entry["timestamp"]), tokens, entry["output_length"], entry["type"])


def _row(
    arrival_s: float | None,
    input_tokens: str | int,
    output_tokens: str | int,
    class_name: str = "",
) -> TraceRow:
    # A few rows of public traces have no input or no output; a request needs one token of each.
    return TraceRow(
        class_name=class_name,
        arrival_s=arrival_s,
        input_tokens=max(1, int(float(input_tokens))),
        output_tokens=max(1, int(float(output_tokens))),
    )


def plan(options: WorkloadOptions) -> Iterator[PlannedRequest]:
    """Returns the requests in order of arrival, until `requests`, `duration_s` or the trace's end.

    Lengths, classes and gaps are drawn from separate streams of the seed, so that changing the rate
    does not change the requests themselves.
    """
    lengths, classes, gaps = (
        random.Random(f"{options.seed}/{name}") for name in ("lengths", "classes", "gaps")
    )
    rows = _row_source(options, random.Random(f"{options.seed}/rows"))
    by_name = {slo.name: slo for slo in options.classes}
    sums = list(itertools.accumulate(slo.weight for slo in options.classes))
    gap_s = _gaps_s(options, gaps)
    elapsed_s = 0.0
    for index, row in enumerate(itertools.islice(rows, options.requests)):
        if options.rate_rps is not None:
            elapsed_s += next(gap_s)
        elif not options.open_arrivals and row.arrival_s is not None:
            elapsed_s = row.arrival_s
        arrival_s = elapsed_s / options.rate_scale
        if options.duration_s is not None and arrival_s > options.duration_s:
            return
        given_in, given_out = options.input_tokens, options.output_tokens
        input_tokens = row.input_tokens if given_in is None else given_in(lengths)
        output_tokens = row.output_tokens if given_out is None else given_out(lengths)
        if not row.class_name:
            slo = classes.choices(options.classes, cum_weights=sums)[0]
        elif (known := by_name.get(row.class_name)) is not None:
            slo = known
        else:
            slo = by_name[row.class_name] = SloClass(name=row.class_name)
        yield PlannedRequest(
            index=index,
            arrival_s=arrival_s,
            input_tokens=min(input_tokens, options.max_input_tokens or input_tokens),
            output_tokens=min(output_tokens, options.max_output_tokens or output_tokens),
            slo=slo,
        )


def _gaps_s(options: WorkloadOptions, rng: random.Random) -> Iterator[float]:
    """Yields gaps between arrivals at the mean rate of `options`, which must have one."""
    rate_rps = options.rate_rps or 0.0
    if options.gaps is not None:
        for gap in options.gaps(rng):
            yield gap / rate_rps
    while True:
        yield rng.expovariate(rate_rps)


def _row_source(options: WorkloadOptions, rng: random.Random) -> Iterator[TraceRow]:
    """Yields the trace as it is when its arrivals count; else its rows in a drawn order,
    repeatedly.
    """
    draw = options.draw_row
    while draw is not None:
        yield draw(rng)
    if not options.trace:
        yield from itertools.repeat(TraceRow(arrival_s=None, input_tokens=1, output_tokens=1))
    timed = options.trace[0].arrival_s is not None
    if timed and options.rate_rps is None and not options.open_arrivals:
        yield from options.trace
        return
    while True:
        yield from rng.sample(options.trace, len(options.trace))
