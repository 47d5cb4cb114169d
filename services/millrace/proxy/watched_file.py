"""Reads a file of settings again when it changes, as a mounted Secret or ConfigMap does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from millrace.core.errors import ConfigError

log = logging.getLogger(__name__)

#: How often a file is looked at.
LOOK_S = 1.0

_Stamp = tuple[int, int, int]


class WatchedFile:
    """The file that a setting names.

    If the file becomes unreadable or wrong, what was read last stays in use, and the log says why.
    """

    def __init__(self, setting: str, path: str, use: Callable[[str], None]) -> None:
        """`use` takes the text of the file; it raises ConfigError for a wrong text."""
        self._setting = setting
        self._path = Path(path)
        self._use = use
        self._stamp: _Stamp | None = None
        self._trouble = ""

    def read(self) -> None:
        """Reads the file. Raises ConfigError naming the setting."""
        try:
            stamp = self._stamped()
            self._use(self._path.read_text(encoding="utf-8"))
        except OSError as error:
            raise self._unfit(error.strerror or str(error)) from error
        except (ConfigError, UnicodeDecodeError) as error:
            raise self._unfit(str(error)) from error
        self._stamp = stamp

    def look(self) -> None:
        """Reads the file again if it has changed since it was read."""
        try:
            if self._changed():
                self.read()
                log.info("%s %s was read again", self._setting, self._path)
            self._trouble = ""
        except ConfigError as error:
            if str(error) != self._trouble:
                self._trouble = str(error)
                log.error("what was read before stays in use: %s", error)

    def _changed(self) -> bool:
        try:
            return self._stamped() != self._stamp
        except OSError as error:
            raise self._unfit(error.strerror or str(error)) from error

    def _stamped(self) -> _Stamp:
        """Identifies the content: it changes when a mounted file is replaced."""
        found = self._path.stat()
        return found.st_mtime_ns, found.st_ino, found.st_size

    def _unfit(self, reason: str) -> ConfigError:
        return ConfigError(f"{self._setting} {self._path}: {reason}")
