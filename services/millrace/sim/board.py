"""Makes the board's lines of a recorded live run: the run is replayed and observed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from millrace.core.board.events import Head, Notice, head_line, line_of
from millrace.core.board.observer import Observer
from millrace.core.config import SchedulerConfig
from millrace.core.scheduler.effects import Effect
from millrace.core.scheduler.events import Event
from millrace.core.scheduler.machine import Machine
from millrace.sim.replay import replay


def board_of_recording(path: Path, write: Callable[[dict[str, Any]], None]) -> None:
    """Calls `write` with the lines of a recording that `millrace scheduler --record` wrote.

    Where this version decides otherwise than the recorded one did, the lines end with a notice.
    Raises RecordingError for a file that is no recording.
    """
    write(head_line(Head(source="recording", title=path.name)))
    last_s = 0.0

    def observed(config: SchedulerConfig) -> Callable[[Event, float], list[Effect]]:
        machine = Machine(config)
        observer = Observer(machine)

        def step(event: Event, now_s: float) -> list[Effect]:
            nonlocal last_s
            last_s = now_s
            effects = machine.step(event, now_s)
            for found in observer.saw(event, effects, now_s):
                write(line_of(found, now_s))
            return effects

        return step

    result = replay(path, observed)
    if result.difference is not None:
        text = f"from here on this version decides otherwise (line {result.difference.line})"
        write(line_of(Notice(text=text), last_s))
