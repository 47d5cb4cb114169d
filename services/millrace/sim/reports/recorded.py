"""Makes a report of a recording of `--record`: the run is replayed and watched."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from millrace.core.autoscale.load_meter import LoadMeter
from millrace.core.config import SchedulerConfig
from millrace.core.errors import ConfigError
from millrace.core.report.follower import OutcomeFollower
from millrace.core.report.outcome import Outcome
from millrace.core.report.pool_sample import PoolSample, samples_of
from millrace.core.scheduler.effects import Effect
from millrace.core.scheduler.events import Event, Submitted
from millrace.core.scheduler.machine import Machine
from millrace.sim.replay import ReplayResult, began_unix_s, replay
from millrace.sim.reports.pools import pool_rows
from millrace.sim.reports.report import RunReport, report_of

#: The distance of two samples of the load.
SAMPLE_S = 1.0


class EmptyRange(ConfigError):
    """No request came in the range."""


def report_of_recording(
    path: Path, *, from_s: float = 0.0, to_s: float = math.inf, worst: int = 5
) -> RunReport:
    """Returns the report of the requests that came from `from_s` on and before `to_s`, in seconds
    after the recording's first step.

    Raises ConfigError for a range without requests, RecordingError for a file that is no recording.
    """
    follower = _Follower(from_s, to_s)
    result = replay(path, follower.around)
    follower.end()
    found = follower.outcomes
    if not follower.requests:
        raise EmptyRange(f"{path}: the recording has no request in {result.duration_s:.3g} s")
    if not found:
        raise EmptyRange(
            f"{path}: no request came {in_range(from_s, to_s)}; the recording has "
            f"{follower.requests} requests in {result.duration_s:.3g} s"
        )
    end_s = max(min(to_s, result.duration_s), from_s + SAMPLE_S)
    return report_of(
        found,
        pool_rows(follower.pools),
        began_unix_s=began_unix_s(path),
        from_s=from_s,
        to_s=end_s,
        worst=worst,
        notes=_notes(result),
    )


def in_range(from_s: float, to_s: float) -> str:
    """Returns the range in words; `to_s` may be infinite."""
    return f"from {from_s:g} s on" if to_s == math.inf else f"from {from_s:g} to {to_s:g} s"


def _notes(result: ReplayResult) -> list[str]:
    notes = []
    if result.difference is not None:
        where = f"line {result.difference.line}"
        notes.append(f"this version decides otherwise from {where} on: the report ends there")
    if result.cut:
        notes.append("the recording's last line is not whole, and is left out")
    return notes


class _Follower:
    """Steps a machine, notes what becomes of the requests of a range, and samples the load."""

    def __init__(self, from_s: float, to_s: float) -> None:
        self._range = from_s, to_s
        self._now_s = 0.0
        self._sampled_s = -math.inf
        self._follower: OutcomeFollower | None = None
        self.requests = 0
        self.outcomes: list[Outcome] = []
        self.pools: list[PoolSample] = []

    def around(self, config: SchedulerConfig) -> Callable[[Event, float], list[Effect]]:
        """Returns the step of a new machine."""
        machine = Machine(config)
        meter: LoadMeter | None = None
        zero_s = 0.0

        def step(event: Event, now_s: float) -> list[Effect]:
            nonlocal meter, zero_s
            if meter is None or self._follower is None:
                meter, zero_s = LoadMeter(machine, now_s), now_s
                self._follower = OutcomeFollower(machine, now_s, self._is_in_range)
            self._now_s = now_s
            effects = machine.step(event, now_s)
            meter.saw(event, effects, now_s)
            self.requests += isinstance(event, Submitted)
            self.outcomes += self._follower.saw(event, effects, now_s)
            if self._is_in_range(now_s - zero_s) and now_s >= self._sampled_s + SAMPLE_S:
                self._sampled_s = now_s
                self.pools += samples_of(meter.load(now_s), now_s)
            return effects

        return step

    def end(self) -> None:
        """Notes the requests that have not ended, as they are."""
        if self._follower is not None:
            self.outcomes += self._follower.end(self._now_s)

    def _is_in_range(self, since_s: float) -> bool:
        return self._range[0] <= since_s < self._range[1]
