"""Records a live run for `millrace sim replay`; `core.scheduler.recording` defines the format.

The lines of steps are collected in memory and written to the file when enough lines are there, or
once per second. A disk error ends the recording, never the service.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from millrace.core.config import SchedulerConfig
from millrace.core.errors import reason_of
from millrace.core.scheduler import recording
from millrace.core.scheduler.effects import Effect
from millrace.core.scheduler.events import Event
from millrace.core.scheduler.recording import RecordingError

log = logging.getLogger(__name__)

BUFFER_BYTES = 1 << 18
FLUSH_S = 1.0

Step = Callable[[Event, float], list[Effect]]


class Recording:
    """Records to one file. `around(machine.step)` returns a step that also records.

    An existing file is renamed to PATH.old: it may show why the scheduler was restarted.
    """

    def __init__(
        self, path: Path, config: SchedulerConfig, zero_unix_s: float | None = None
    ) -> None:
        """Opens the file; `zero_unix_s` as in `core.scheduler.recording.head`.

        Raises RecordingError if the file can't be written.
        """
        self.path = path
        self.steps = 0
        self._flushed_s = 0.0
        self._file: BinaryIO | None = None
        try:
            if path.is_file():
                path.replace(path.with_name(f"{path.name}.old"))
            self._file = path.open("wb", buffering=BUFFER_BYTES)
            self._file.write(orjson.dumps(recording.head(config, zero_unix_s)) + b"\n")
            self._file.flush()
        except OSError as error:
            self._give_up()
            raise RecordingError(f"recording {path}: {reason_of(error)}") from error

    def around(self, step: Step) -> Step:
        """Returns a `step` that records its event and effects, also if it raises."""

        def recording_step(event: Event, now_s: float) -> list[Effect]:
            line: dict[str, Any] = {"now_s": now_s, "event": recording.plain_event(event)}
            try:
                effects = step(event, now_s)
            except Exception as error:
                self._write({**line, "raised": f"{type(error).__name__}: {error}"}, now_s)
                raise
            line["effects"] = recording.plain_effects(effects)
            self._write(line, now_s)
            return effects

        return recording_step

    def close(self) -> None:
        """Writes the rest and closes the file. A second call does nothing."""
        if self._file is not None:
            file, self._file = self._file, None
            try:
                file.close()
            except OSError as error:
                log.error("the end of the recording %s is lost: %s", self.path, error)
            else:
                log.info("recorded %d steps in %s", self.steps, self.path)

    def _write(self, line: dict[str, Any], now_s: float) -> None:
        if self._file is None:
            return
        try:
            self._file.write(orjson.dumps(line) + b"\n")
            if now_s - self._flushed_s >= FLUSH_S:
                self._file.flush()
                self._flushed_s = now_s
        except OSError as error:
            log.error("recording %s ends here: %s", self.path, error)
            self._give_up()
        else:
            self.steps += 1

    def _give_up(self) -> None:
        """Closes the file and drops the buffered lines."""
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):
                file.close()
