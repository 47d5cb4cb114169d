"""Logs to stderr: readable lines, or one JSON object per line for a collector."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from millrace.core.config import TelemetryConfig

#: Attributes of every LogRecord; all others came by `extra=`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {
    *("message", "asctime", "taskName"),
    "color_message",  # uvicorn's, with codes of a terminal
}


class _JsonLines(logging.Formatter):
    """Formats time (RFC 3339, UTC), level, service, logger, message, exception, and every
    `extra`.
    """

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def format(self, record: logging.LogRecord) -> str:
        line = extras(record) | {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "service": self._service,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class _TextLines(logging.Formatter):
    """Formats `HH:MM:SS.mmm level service logger: message key=value ...`, then any traceback."""

    def __init__(self, service: str) -> None:
        super().__init__(datefmt="%H:%M:%S")
        self._service = service

    def formatMessage(self, record: logging.LogRecord) -> str:
        more = [f"{name}={value}" for name, value in extras(record).items()]
        head = (
            f"{self.formatTime(record, self.datefmt)}.{int(record.msecs):03d} "
            f"{record.levelname.lower():<7} {self._service} {record.name}:"
        )
        return " ".join([head, record.message, *more])


def extras(record: logging.LogRecord) -> dict[str, object]:
    """Returns what a record got by `extra=`."""
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def setup_logging(config: TelemetryConfig, service: str) -> None:
    """Sends all of the process's log records at `config.log_level` and above to stderr.

    `service` names the process, such as "decode-0". Another call replaces the settings.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _JsonLines(service) if config.log_format == "json" else _TextLines(service)
    )
    logging.basicConfig(level=config.log_level.upper(), handlers=[handler], force=True)
    logging.captureWarnings(True)
