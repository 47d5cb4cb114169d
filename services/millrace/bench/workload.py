"""What a load test sends and when: lengths, arrivals and objective classes, all drawn from a seed.

Trace files, plain or gzip, are told apart by their first line:
- Azure LLM inference: CSV with TIMESTAMP, ContextTokens, GeneratedTokens;
- Mooncake: JSON lines with timestamp (ms), input_length, output_length;
- Vidur and Sarathi: CSV with num_prefill_tokens, num_decode_tokens, and arrived_at (s) or no times.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from millrace.core.errors import ConfigError

Draw = Callable[[random.Random], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace; `arrival_s` counts from the first one, None where there are none."""

    arrival_s: float | None
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClass:
    """Objectives in seconds, None where there is none; `weight` is the class's share of traffic."""

    name: str
    ttft_s: float | None = None
    tbt_s: float | None = None
    weight: float = 1.0

    @classmethod
    def parse(cls, text: str) -> SloClass:
        """Reads name:ttft_ms:tbt_ms[:weight]; 0 ms means no objective. Raises ConfigError."""
        name, *rest = text.split(":")
        try:
            numbers = [float(part) for part in rest]
        except ValueError:
            numbers = []
        valid = len(numbers) in (2, 3) and all(0 <= n < math.inf for n in numbers)
        if not name or not valid or (len(numbers) == 3 and numbers[2] == 0):
            raise ConfigError(
                f"--slo-class {text!r}: write it as name:ttft_ms:tbt_ms[:weight], numbers >= 0"
            )
        return cls(
            name=name,
            ttft_s=numbers[0] / 1e3 or None,
            tbt_s=numbers[1] / 1e3 or None,
            weight=numbers[2] if len(numbers) == 3 else 1.0,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """One request to send: `arrival_s` after the start, or None when a free slot decides."""

    index: int
    arrival_s: float | None
    input_tokens: int
    output_tokens: int
    slo: SloClass


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadOptions:
    """How to draw a workload. Without `rate_rps`, arrivals are the trace's, or left open."""

    trace: Sequence[TraceRow] = ()
    rate_rps: float | None = None
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
    """A length distribution in tokens: `N`, `LOW:HIGH` (uniform) or `lognormal:MEAN:STD`.

    MEAN and STD are those of the lengths themselves. Raises ConfigError naming `option`.
    """
    parts = text.split(":")
    try:
        if parts[0] == "lognormal" and len(parts) == 3:
            return _lognormal(float(parts[1]), float(parts[2]))
        low, high = int(parts[0]), int(parts[-1])
        if 1 <= low <= high and len(parts) <= 2:
            return lambda rng: rng.randint(low, high)
    except ValueError:
        pass
    raise ConfigError(
        f"{option} {text!r}: write N, LOW:HIGH or lognormal:MEAN:STD, in tokens, at least 1"
    )


def _lognormal(mean: float, std: float) -> Draw:
    if not (1 <= mean < math.inf and 0 <= std < math.inf):
        raise ValueError
    sigma_squared = math.log1p((std / mean) ** 2)
    mu, sigma = math.log(mean) - sigma_squared / 2, math.sqrt(sigma_squared)
    return lambda rng: max(1, round(rng.lognormvariate(mu, sigma)))


def read_trace(path: Path) -> list[TraceRow]:
    """Reads a trace, ordered by arrival. Raises ConfigError for a file that is none."""
    try:
        with path.open("rb") as probe:
            packed = probe.read(2) == b"\x1f\x8b"
        with gzip.open(path, "rt") if packed else path.open() as lines:
            rows = list(_rows(lines))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path}: {error}") from error
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ConfigError(f"trace {path}: not a trace this command knows ({error})") from error
    if not rows:
        raise ConfigError(f"trace {path}: holds no requests")
    if rows[0].arrival_s is None:
        return rows
    rows.sort(key=lambda row: row.arrival_s or 0.0)
    start_s = rows[0].arrival_s or 0.0
    return [
        TraceRow(
            arrival_s=(row.arrival_s or 0.0) - start_s,
            input_tokens=row.input_tokens,
            output_tokens=row.output_tokens,
        )
        for row in rows
    ]


def _rows(lines: Iterable[str]) -> Iterator[TraceRow]:
    stream = iter(lines)
    first = next(stream, "")
    if first.startswith("{"):
        for line in itertools.chain([first], stream):
            if line.strip():
                entry = json.loads(line)
                times = entry["timestamp"] / 1e3
                yield _row(times, entry["input_length"], entry["output_length"])
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


def _row(arrival_s: float | None, input_tokens: str | int, output_tokens: str | int) -> TraceRow:
    # A few rows of public traces have no input or no output; a request needs one token of each.
    return TraceRow(
        arrival_s=arrival_s,
        input_tokens=max(1, int(float(input_tokens))),
        output_tokens=max(1, int(float(output_tokens))),
    )


def plan(options: WorkloadOptions) -> Iterator[PlannedRequest]:
    """The requests in order of arrival, until `requests`, `duration_s` or the trace's end.

    Lengths, classes and gaps are drawn from separate streams of the seed, so that changing the
    rate leaves the requests themselves alone.
    """
    lengths, classes, gaps = (
        random.Random(f"{options.seed}/{name}") for name in ("lengths", "classes", "gaps")
    )
    rows = _row_source(options, random.Random(f"{options.seed}/rows"))
    weights = [slo.weight for slo in options.classes]
    elapsed_s = 0.0
    for index, row in enumerate(itertools.islice(rows, options.requests)):
        arrival_s: float | None = None
        if options.rate_rps is not None:
            arrival_s = elapsed_s = elapsed_s + gaps.expovariate(options.rate_rps)
        elif not options.open_arrivals and row.arrival_s is not None:
            arrival_s = row.arrival_s
        if arrival_s is not None:
            arrival_s /= options.rate_scale
            if options.duration_s is not None and arrival_s > options.duration_s:
                return
        given_in, given_out = options.input_tokens, options.output_tokens
        input_tokens = row.input_tokens if given_in is None else given_in(lengths)
        output_tokens = row.output_tokens if given_out is None else given_out(lengths)
        yield PlannedRequest(
            index=index,
            arrival_s=arrival_s,
            input_tokens=min(input_tokens, options.max_input_tokens or input_tokens),
            output_tokens=min(output_tokens, options.max_output_tokens or output_tokens),
            slo=classes.choices(options.classes, weights)[0],
        )


def _row_source(options: WorkloadOptions, rng: random.Random) -> Iterator[TraceRow]:
    """The trace as it is when its arrivals count; else its rows in a drawn order, over and over."""
    if not options.trace:
        yield from itertools.repeat(TraceRow(arrival_s=None, input_tokens=1, output_tokens=1))
    timed = options.trace[0].arrival_s is not None
    if timed and options.rate_rps is None and not options.open_arrivals:
        yield from options.trace
        return
    while True:
        yield from rng.sample(options.trace, len(options.trace))
