"""Reads the lines of a recorded live run; `core.scheduler.recording` defines the format."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from millrace.core.config import SchedulerConfig
from millrace.core.errors import reason_of
from millrace.core.scheduler import recording
from millrace.core.scheduler.events import Event
from millrace.core.scheduler.recording import RecordingError
from millrace.sim.packed import open_packed


class RecordingLines(Iterator[dict[str, Any]]):
    """The steps of a recording, plain or gzip, as objects; the settings stand in the first line.

    A last line without its end is left out and noted in `cut`: the process died while it wrote.
    All methods raise RecordingError, with the file and the line, for what is no recording.
    """

    def __init__(self, path: Path) -> None:
        self.number = 0  # of the line read last, from 1
        self.cut = False
        self._path = path
        self._lines = self._read()
        self.head = next(self._lines, {})
        try:
            self.config: SchedulerConfig = recording.config_of(self.head)
        except RecordingError as error:
            raise RecordingError(f"{path}: {error}") from error

    def __next__(self) -> dict[str, Any]:
        return next(self._lines)

    def step(self, line: dict[str, Any]) -> tuple[float, Event, list[Any]]:
        """Returns the time, in seconds, the event and the effects of the step read last.

        A step that raised has one entry instead of effects: ["raised", the error].
        """
        where = f"{self._path}, line {self.number}"
        try:
            effects = [["raised", line["raised"]]] if "raised" in line else list(line["effects"])
            return float(line["now_s"]), recording.event_of(line["event"]), effects
        except (KeyError, TypeError, ValueError) as error:
            raise RecordingError(f"{where}: no step: {error!r}") from error
        except RecordingError as error:
            raise RecordingError(f"{where}: {error}") from error

    def _read(self) -> Iterator[dict[str, Any]]:
        try:
            with open_packed(self._path) as file:
                for text in file:
                    if not text.endswith(b"\n"):
                        self.cut = True
                        return
                    self.number += 1
                    yield self._object(text)
        except (OSError, EOFError) as error:
            raise RecordingError(f"recording {self._path}: {reason_of(error)}") from error

    def _object(self, text: bytes) -> dict[str, Any]:
        try:
            found = orjson.loads(text)
        except orjson.JSONDecodeError as error:
            raise RecordingError(f"{self._path}, line {self.number}: {error}") from error
        if not isinstance(found, dict):
            raise RecordingError(f"{self._path}, line {self.number}: it must be an object")
        return found
