"""Runs one simulation from one description: the cluster, the workload, and what to observe."""

from __future__ import annotations

import copyreg
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from millrace.core.cost.profile import Profile
from millrace.core.errors import ConfigError
from millrace.sim.cluster.spec import SimSpec
from millrace.sim.loop import Simulation
from millrace.sim.objectives import isolated_prefill, with_objectives
from millrace.sim.results.report import Collector, Report, RequestRecord
from millrace.sim.results.timeline import Timeline
from millrace.sim.workload.mixes import LONG_FRACTION, TABLE_2_TTFT_S, MixOptions, build_mix
from millrace.sim.workload.traces import TraceRow, cut_window, read_trace
from millrace.sim.workload.workload import (
    PlannedRequest,
    SloClass,
    WorkloadOptions,
    plan,
)


def _plain(profile: Profile) -> tuple[Callable[[object], Profile], tuple[object]]:
    return Profile.from_json, (profile.to_json(),)


# Runs go to other processes, and a profile's read-only mappings don't.
copyreg.pickle(Profile, _plain)

Progress = Callable[[int, float], None]  # requests ended, simulated seconds

DEFAULT_REQUESTS = 1000  # of a mix


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The requests of a run. Raises ConfigError for contradictions.

    `trace` or `mix`, or both: then the trace's lengths are the short requests of medha-mix. Without
    `rate_rps` a trace is replayed at its own times; a mix and a trace of lengths need `rate_rps`.
    `requests` is needed where the trace's end does not determine their number.
    """

    trace: Path | None = None
    mix: str = ""
    window_s: tuple[float, float] | None = None
    rate_rps: float | None = None
    rate_scale: float = 1.0
    slo_scale: float = 1.0
    slo_classes: tuple[SloClass, ...] = ()
    long_fraction: float = LONG_FRACTION
    max_input_tokens: int | None = None
    requests: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.trace is None and not self.mix:
            raise ConfigError("--trace and --mix are both missing: one must say what to send")
        if self.trace is not None and self.mix not in ("", "medha-mix"):
            raise ConfigError(f"--mix {self.mix!r} takes no --trace; medha-mix alone does")
        if self.mix and self.rate_rps is None:
            raise ConfigError(f"--mix {self.mix!r} needs --rate, in requests/s")
        if self.window_s is not None and self.trace is None:
            raise ConfigError("--window cuts a --trace, and there is none")
        if self.long_fraction != LONG_FRACTION and self.mix != "medha-mix":
            raise ConfigError(
                f"--long-fraction {self.long_fraction:g}: --mix medha-mix alone has long requests"
            )
        for name in ("rate_rps", "rate_scale", "slo_scale", "requests", "max_input_tokens"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                option = name.removesuffix("_rps").replace("_", "-")
                raise ConfigError(f"--{option} {value}: it must be more than 0 and finite")

    @property
    def is_replayed(self) -> bool:
        """Returns whether arrivals are the trace's own, scaled."""
        return self.rate_rps is None

    def rows(self) -> Sequence[TraceRow]:
        """Returns the trace's rows in its window; none without a trace. Raises ConfigError."""
        if self.trace is None:
            return ()
        rows = _read(self.trace)
        if self.window_s is not None:
            rows = cut_window(rows, *self.window_s)
        if self.rate_rps is None and rows[0].arrival_s is None:
            raise ConfigError(
                f"trace {self.trace} has lengths only: it needs --rate, in requests/s"
            )
        return rows

    def count(self) -> int:
        """Returns how many requests the run has."""
        if self.requests is not None and not self.is_replayed:
            return self.requests
        if self.mix:
            return DEFAULT_REQUESTS
        length = len(self.rows())
        return min(length, self.requests or length)

    def options(self, model: str) -> WorkloadOptions:
        """Returns the options of `workload.plan` for these requests, for a model's objectives."""
        rows = self.rows()
        known: Sequence[SloClass] = ()
        options = WorkloadOptions(
            trace=rows or None,
            rate_rps=self.rate_rps,
            rate_scale=self.rate_scale,
            max_input_tokens=self.max_input_tokens,
            requests=self.count(),
            seed=self.seed,
        )
        if self.mix:
            mix_options = MixOptions(model=model, long_fraction=self.long_fraction, short_rows=rows)
            mix = build_mix(self.mix, mix_options)
            known = mix.slo_classes
            options = replace(options, draw_row=mix.row_draw(), gaps=mix.gaps)
        elif any(row.class_name and row.slo is None for row in rows) and model in TABLE_2_TTFT_S:
            table = TABLE_2_TTFT_S[model]
            known = tuple(SloClass(name=name, ttft_s=ttft_s) for name, ttft_s in table.items())
        given = {slo.name for slo in self.slo_classes}
        classes = (*self.slo_classes, *(slo for slo in known if slo.name not in given))
        return replace(options, classes=classes or (SloClass(name="default"),))


@lru_cache(maxsize=4)
def _read(path: Path) -> list[TraceRow]:
    return read_trace(path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A cluster and its traffic: all inputs that determine a run's figures."""

    spec: SimSpec
    traffic: Traffic

    def at_load(self, load: float) -> Scenario:
        """Returns the scenario at another load: requests/s, or the scale of a replayed trace."""
        traffic = self.traffic
        if traffic.is_replayed:
            return replace(self, traffic=replace(traffic, rate_scale=load))
        return replace(self, traffic=replace(traffic, rate_rps=load))

    def at_slo_scale(self, scale: float) -> Scenario:
        """Returns the scenario with objectives times `scale`."""
        return replace(self, traffic=replace(self.traffic, slo_scale=scale))

    def requests(self) -> Iterator[PlannedRequest]:
        """Returns the requests in order of arrival, each with a TTFT objective."""
        drawn = plan(self.traffic.options(self.spec.profile.model))
        return with_objectives(drawn, isolated_prefill(self.spec), self.traffic.slo_scale)


@dataclass(frozen=True, slots=True, kw_only=True)
class Watch:
    """The other outputs of a run, and when it stops early. `goal` is an attainment, 0 to 1.

    With `goal`, the run ends as soon as more than 1 - `goal` of all its requests have missed: its
    report then only says so. `stop` is asked after every request that ended: a run also ends where
    it returns True.
    """

    sink: Callable[[RequestRecord], None] | None = None
    board: Callable[[dict[str, Any]], None] | None = None  # lines of the board
    timeline: Timeline | None = None
    progress: Progress | None = None
    goal: float | None = None
    stop: Callable[[], bool] | None = None


def simulate(scenario: Scenario, watch: Watch = Watch()) -> Report:
    """Simulates a scenario to its end. Raises ConfigError for impossible traffic."""
    collector = Collector(watch.sink)
    most = None if watch.goal is None else misses_allowed(scenario.traffic.count(), watch.goal)

    def stop(found: Collector) -> bool:
        if watch.stop is not None and watch.stop():
            return True
        return most is not None and found.missed > most

    counters = Simulation(
        scenario.spec,
        scenario.requests(),
        collector,
        watch.timeline,
        progress=watch.progress,
        stop=stop,
        board=watch.board,
    ).run()
    return collector.report(counters.duration_s, counters)


def misses_allowed(requests: int, goal: float) -> int:
    """Returns the most misses with which `requests` still attain `goal`."""
    return math.floor(requests * (1 - goal) + 1e-9)
