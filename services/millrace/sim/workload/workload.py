"""The requests of a load test or a simulation: lengths, arrivals and classes from one seed."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from millrace.core.errors import ConfigError
from millrace.core.weights import DEFAULT_TENANT
from millrace.sim.workload.arrivals import Gaps
from millrace.sim.workload.traces import TraceRow

Draw = Callable[[random.Random], int]
RowDraw = Callable[[random.Random], TraceRow]


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClass:
    """Objectives in seconds, None where there is none; `weight` is the class's share of traffic."""

    name: str
    ttft_s: float | None = None
    tbt_s: float | None = None
    e2e_s: float | None = None
    weight: float = 1.0

    @property
    def has_objectives(self) -> bool:
        return any(one is not None for one in (self.ttft_s, self.tbt_s, self.e2e_s))

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

    Rows come from `trace`, or one by one from `draw_row`; an empty trace has no requests. A row's
    class is the class of `classes` with its name. If that has no objectives, or there is none, the
    row's own objectives count; rows without a name draw their class by weight.
    """

    trace: Sequence[TraceRow] | None = None
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
        if row.class_name:
            slo = _class_of(row, by_name)
        else:
            slo = classes.choices(options.classes, cum_weights=sums)[0]
        yield PlannedRequest(
            index=index,
            arrival_s=arrival_s,
            input_tokens=min(input_tokens, options.max_input_tokens or input_tokens),
            output_tokens=min(output_tokens, options.max_output_tokens or output_tokens),
            slo=slo,
            tenant=row.tenant,
        )


def _class_of(row: TraceRow, known: Mapping[str, SloClass]) -> SloClass:
    """Returns the class of `known` with the row's name; else the row's own objectives, if any."""
    if (found := known.get(row.class_name)) is not None and found.has_objectives:
        return found
    own = row.slo
    if own is None:
        return SloClass(name=row.class_name)
    return SloClass(name=row.class_name, ttft_s=own.ttft_s, tbt_s=own.tbt_s, e2e_s=own.e2e_s)


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
    if options.trace is None:
        yield from itertools.repeat(TraceRow(arrival_s=None, input_tokens=1, output_tokens=1))
    if not options.trace:
        return
    timed = options.trace[0].arrival_s is not None
    if timed and options.rate_rps is None and not options.open_arrivals:
        yield from options.trace
        return
    while True:
        yield from rng.sample(options.trace, len(options.trace))
