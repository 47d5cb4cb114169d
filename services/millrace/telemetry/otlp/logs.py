"""Sends a process's log records to a collector.

Records wait in a bounded queue, and a thread exports them: a collector that is down costs records,
never requests. All records still go to stderr.
"""

from __future__ import annotations

import logging
from typing import Final

from opentelemetry._logs import LogRecord, SeverityNumber
from opentelemetry.exporter.otlp.proto.grpc._log_exporter import OTLPLogExporter
from opentelemetry.sdk._logs import LoggerProvider
from opentelemetry.sdk._logs.export import BatchLogRecordProcessor
from opentelemetry.sdk.resources import Resource
from opentelemetry.trace import TraceFlags

from millrace.telemetry.log import extras
from millrace.telemetry.otlp.collector import connection

_EXPORT_EVERY_MS: Final = 1000
_MOST_QUEUED_RECORDS: Final = 8192

_FORMATTER: Final = logging.Formatter()
_SEVERITIES: Final = {
    logging.DEBUG: SeverityNumber.DEBUG,
    logging.INFO: SeverityNumber.INFO,
    logging.WARNING: SeverityNumber.WARN,
    logging.ERROR: SeverityNumber.ERROR,
    logging.CRITICAL: SeverityNumber.FATAL,
}


class OtlpLogs(logging.Handler):
    """A handler of the root logger, from its start to `close`."""

    @staticmethod
    def start(endpoint: str, resource: Resource) -> OtlpLogs:
        handler = OtlpLogs(endpoint, resource)
        logging.getLogger().addHandler(handler)
        return handler

    def __init__(self, endpoint: str, resource: Resource) -> None:
        super().__init__()
        self._provider = LoggerProvider(resource, shutdown_on_exit=False)
        self._provider.add_log_record_processor(
            BatchLogRecordProcessor(
                OTLPLogExporter(**connection(endpoint)),
                schedule_delay_millis=_EXPORT_EVERY_MS,
                max_queue_size=_MOST_QUEUED_RECORDS,
            )
        )
        # What the exporter logs of its own failures would be exported in turn.
        self.addFilter(lambda record: not record.name.startswith("opentelemetry."))

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._provider.get_logger(record.name).emit(_translated(record))
        except Exception:  # as logging's own handlers: an error of a log record ends nothing
            self.handleError(record)

    def close(self) -> None:
        """Leaves the root logger, and exports the queued records; waits a few seconds at most."""
        logging.getLogger().removeHandler(self)
        self._provider.shutdown()
        super().close()


def _translated(record: logging.LogRecord) -> LogRecord:
    attributes = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in extras(record).items()
    }
    trace_id = str(attributes.pop("trace_id", ""))
    if record.exc_info and record.exc_info[0] is not None:
        attributes["exception.type"] = record.exc_info[0].__name__
        attributes["exception.message"] = str(record.exc_info[1])
        attributes["exception.stacktrace"] = _FORMATTER.formatException(record.exc_info)
    severity = _SEVERITIES.get(record.levelno, SeverityNumber.UNSPECIFIED)
    return LogRecord(
        timestamp=round(record.created * 1e9),
        trace_id=int(trace_id, 16) if trace_id else None,
        trace_flags=TraceFlags(0),
        severity_number=severity,
        severity_text=severity.name,
        body=record.getMessage(),
        attributes=attributes,
    )
