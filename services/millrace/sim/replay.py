"""Replays a recorded live run: the same events, at the same times, must bring the same effects.

The scheduler and the simulator drive one `Machine`. A replay shows that only events and their times
decide, and not the process, its clock or the order of a set.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson

from millrace.core.config import SchedulerConfig
from millrace.core.scheduler import recording
from millrace.core.scheduler.effects import Effect
from millrace.core.scheduler.events import Event
from millrace.core.scheduler.machine import Machine
from millrace.core.scheduler.recording import RecordingError
from millrace.sim.recordings import RecordingLines


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """The first step with another result; effects as `core.scheduler.recording` writes them.

    A step that raised has one entry instead, ["raised", the error].
    """

    line: int  # in the file, from 1
    now_s: float
    event: list[Any]
    recorded: list[Any]
    replayed: list[Any]

    def __str__(self) -> str:
        """Returns the differences, one effect per line: `-` was recorded, `+` is of the replay."""
        old, new = ([_text(e) for e in side] for side in (self.recorded, self.replayed))
        same = next((i for i, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), None)
        first = min(len(old), len(new)) if same is None else same
        lines = [f"line {self.line}, at {self.now_s} s: {_text(self.event)}"]
        lines += [f"    {text}" for text in old[:first]]
        lines += [f"  - {text}" for text in old[first:]] + [f"  + {text}" for text in new[first:]]
        return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayResult:
    """How far the replay and the recording agree."""

    steps: int  # taken, including the step that differs
    effects: int  # of the steps that agree
    duration_s: float  # of the live run, first step to last
    cut: bool  # the last line is not whole: the process died while it wrote
    difference: Difference | None

    @property
    def agrees(self) -> bool:
        return self.difference is None

    def to_json(self) -> dict[str, Any]:
        """Plain data, with `agrees`."""
        return {"agrees": self.agrees, **asdict(self)}


def began_unix_s(path: Path) -> float | None:
    """Returns the Unix time of a recording's first step; None where the recording has none.

    Raises RecordingError for a file that is no recording.
    """
    lines = RecordingLines(path)
    first = next(lines, None)
    try:
        zero_s = lines.head.get("zero_unix_s")
        return None if zero_s is None or first is None else float(zero_s) + float(first["now_s"])
    except (KeyError, TypeError, ValueError) as error:
        raise RecordingError(f"{path}: no time of its begin: {error!r}") from error


def replay(
    path: Path,
    build: Callable[[SchedulerConfig], Callable[[Event, float], list[Effect]]] | None = None,
) -> ReplayResult:
    """Steps a machine through a recording, as far as both agree.

    `build` gives the step function for the recorded settings; a new `Machine`'s by default.
    Raises RecordingError for a file that is no recording.
    """
    lines = RecordingLines(path)
    step = (build or _machine_step)(lines.config)
    steps = effects = 0
    first_s = last_s = None
    difference = None
    for line in lines:
        now_s, event, old = lines.step(line)
        first_s, last_s = now_s if first_s is None else first_s, now_s
        new = _replayed(step, event, now_s)
        steps += 1
        if new != old:
            difference = Difference(
                line=lines.number, now_s=now_s, event=line["event"], recorded=old, replayed=new
            )
            break
        effects += len(new)
    return ReplayResult(
        steps=steps,
        effects=effects,
        duration_s=(last_s or 0.0) - (first_s or 0.0),
        cut=lines.cut,
        difference=difference,
    )


def _machine_step(config: SchedulerConfig) -> Callable[[Event, float], list[Effect]]:
    return Machine(config).step


def _replayed(
    step: Callable[[Event, float], list[Effect]], event: Event, now_s: float
) -> list[list[Any]]:
    """Returns the result of the step, through JSON as the recording went."""
    try:
        effects = recording.plain_effects(step(event, now_s))
    except Exception as error:
        return [["raised", f"{type(error).__name__}: {error}"]]
    written: list[list[Any]] = orjson.loads(orjson.dumps(effects))
    return written


def _text(named: list[Any]) -> str:
    """Returns a named object on one line."""
    name, fields = named
    if not isinstance(fields, dict):
        return f"{name}: {fields}"
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in fields.items())})"
