"""Exports spans: over OTLP/gRPC to a collector, or to a file in the format of OTLP in JSON.

Both take FinishedSpans and encode them themselves: the SDK's encoder takes six times as long, which
the proxy would notice.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import orjson
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind

from millrace.core.errors import ConfigError
from millrace.telemetry.otlp.collector import SCOPE, connection
from millrace.telemetry.tracing.finished import FinishedSpan

MAX_FILE_BYTES: Final = 64 << 20  # then the file becomes NAME.1.jsonl, in place of the last one

_SAMPLED: Final = 1  # the flag of a span
#: By the SDK's kind; OTLP has one kind more, for an unknown kind.
_KINDS: Final = {kind: kind.value + 1 for kind in SpanKind}


# ---- OTLP/gRPC


class OtlpSpans(OTLPSpanExporter):
    """The SDK's exporter, with its own channel, retries and headers, and a quicker encoder."""

    def __init__(self, endpoint: str, resource: Resource) -> None:
        """`endpoint`: as of `connection`. `resource`: the process."""
        super().__init__(**connection(endpoint))
        self._resource = resource

    def _translate_data(self, data: Sequence[FinishedSpan]) -> ExportTraceServiceRequest:  # type: ignore[override]
        request = ExportTraceServiceRequest()
        resource_spans = request.resource_spans.add()
        _fill(resource_spans.resource.attributes, self._resource.attributes)
        scope_spans = resource_spans.scope_spans.add()
        scope_spans.scope.name = SCOPE
        for span in data:
            _encode(span, scope_spans.spans.add())
        return request


def _encode(span: FinishedSpan, message: Span) -> None:
    message.trace_id = span.trace_id.to_bytes(16, "big")
    message.span_id = span.span_id.to_bytes(8, "big")
    message.flags = _SAMPLED
    if span.parent_id:
        message.parent_span_id = span.parent_id.to_bytes(8, "big")
    message.name = span.name
    message.kind = _KINDS[span.kind]  # type: ignore[assignment]  # a number of the enum
    message.start_time_unix_nano = span.start_ns
    message.end_time_unix_nano = span.end_ns
    _fill(message.attributes, span.computed())
    for moment in span.moments:
        event = message.events.add()
        event.name, event.time_unix_nano = moment.name, moment.at_ns
        _fill(event.attributes, moment.attributes)
    if span.error:
        message.status.code = Status.STATUS_CODE_ERROR
        message.status.message = span.error


def _fill(into: Any, attributes: Mapping[str, Any]) -> None:  # noqa: ANN401 - a repeated KeyValue
    for name, value in attributes.items():
        pair: KeyValue = into.add()
        pair.key = name
        match value:
            case bool():
                pair.value.bool_value = value
            case int():
                pair.value.int_value = value
            case float():
                pair.value.double_value = value
            case _:
                pair.value.string_value = str(value)


# ---- files


class FileSpans(SpanExporter):
    """Appends lines to FOLDER/NAME.jsonl, each an OTLP `TracesData` of one batch, in JSON."""

    def __init__(self, path: Path, file: io.FileIO, resource: Resource) -> None:
        self._path = path
        self._file = file
        self._resource = _pairs(resource.attributes)
        self._lock = threading.Lock()

    @staticmethod
    def open(folder: str, name: str, resource: Resource) -> FileSpans:
        """`resource`: the process. Raises ConfigError if the file can't be written."""
        path = Path(folder) / f"{name}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return FileSpans(path, io.FileIO(path, "a"), resource)
        except OSError as error:
            raise ConfigError(
                f"telemetry.trace_folder is {folder!r}; {path} can't be written: {error.strerror}"
            ) from error

    def export(self, spans: Sequence[FinishedSpan]) -> SpanExportResult:  # type: ignore[override]
        line = orjson.dumps(self._traces_data(spans), option=orjson.OPT_APPEND_NEWLINE)
        with self._lock:
            try:
                self._append(line)
                if self._file.tell() > MAX_FILE_BYTES:
                    self._file.close()
                    self._path.replace(self._path.with_suffix(".1.jsonl"))
                    self._file = io.FileIO(self._path, "a")
            except (OSError, ValueError):  # the disk is full, or the file could not be opened again
                return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        with self._lock:
            self._file.close()

    def _append(self, line: bytes) -> None:
        """Writes the whole line, or nothing of it: nobody could read a half one."""
        before, rest = self._file.tell(), memoryview(line)
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except OSError:
            self._file.truncate(before)
            self._file.seek(before)
            raise

    def _traces_data(self, spans: Sequence[FinishedSpan]) -> dict[str, Any]:
        """Returns the OTLP `TracesData` of spans as JSON has it: ids in hexadecimal, 64-bit numbers
        as text.
        """
        return {
            "resourceSpans": [
                {
                    "resource": {"attributes": self._resource},
                    "scopeSpans": [
                        {"scope": {"name": SCOPE}, "spans": list(map(_document, spans))}
                    ],
                }
            ]
        }


def _document(span: FinishedSpan) -> dict[str, Any]:
    document = {
        "traceId": f"{span.trace_id:032x}",
        "spanId": f"{span.span_id:016x}",
        "parentSpanId": f"{span.parent_id:016x}" if span.parent_id else "",
        "flags": _SAMPLED,
        "name": span.name,
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(span.start_ns),
        "endTimeUnixNano": str(span.end_ns),
        "attributes": _pairs(span.computed()),
    }
    if span.moments:
        document["events"] = [
            {
                "name": moment.name,
                "timeUnixNano": str(moment.at_ns),
                "attributes": _pairs(moment.attributes),
            }
            for moment in span.moments
        ]
    if span.error:
        document["status"] = {"code": Status.STATUS_CODE_ERROR, "message": span.error}
    return document


def _pairs(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in attributes.items()]


def _value(value: Any) -> dict[str, Any]:  # noqa: ANN401 - a value of an attribute
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
    return {"stringValue": str(value)}
