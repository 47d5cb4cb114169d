"""Exports spans: over OTLP/gRPC to a collector, or to a file in the format of OTLP in JSON.

Both encode the spans themselves: the SDK's encoder takes six times as long, which the proxy would
notice.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import IO, Any, Final

import orjson
from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import SpanKind, StatusCode
from opentelemetry.util.types import Attributes

from millrace.core.errors import ConfigError
from millrace.telemetry.otlp.collector import SCOPE, connection

MAX_FILE_BYTES: Final = 64 << 20  # then the file becomes NAME.1.jsonl, in place of the last one

#: By the SDK's kind; OTLP has one kind more, for an unknown kind.
_KINDS: Final = {kind: kind.value + 1 for kind in SpanKind}


# ---- OTLP/gRPC


class OtlpSpans(OTLPSpanExporter):
    """The SDK's exporter, with its own channel, retries and headers, and a quicker encoder."""

    @staticmethod
    def to(endpoint: str) -> OtlpSpans:
        """`endpoint`: as of `connection`."""
        return OtlpSpans(**connection(endpoint))

    def _translate_data(self, data: Sequence[ReadableSpan]) -> ExportTraceServiceRequest:
        request = ExportTraceServiceRequest()
        resource_spans = request.resource_spans.add()
        _fill(resource_spans.resource.attributes, data[0].resource.attributes)
        scope_spans = resource_spans.scope_spans.add()
        scope_spans.scope.name = SCOPE
        for span in data:
            _encode(span, scope_spans.spans.add())
        return request


def _encode(span: ReadableSpan, message: Span) -> None:
    context, parent = span.context, span.parent
    message.trace_id = context.trace_id.to_bytes(16, "big")
    message.span_id = context.span_id.to_bytes(8, "big")
    message.flags = context.trace_flags
    if parent is not None:
        message.parent_span_id = parent.span_id.to_bytes(8, "big")
    message.name = span.name
    message.kind = _KINDS[span.kind]  # type: ignore[assignment]  # a number of the enum
    message.start_time_unix_nano = span.start_time or 0
    message.end_time_unix_nano = span.end_time or 0
    _fill(message.attributes, span.attributes)
    for event in span.events:
        one = message.events.add()
        one.name, one.time_unix_nano = event.name, event.timestamp
        _fill(one.attributes, event.attributes)
    if span.status.status_code is StatusCode.ERROR:
        message.status.code = Status.STATUS_CODE_ERROR
        message.status.message = span.status.description or ""


def _fill(into: Any, attributes: Attributes) -> None:  # noqa: ANN401 - a repeated KeyValue
    for name, value in (attributes or {}).items():
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

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        self._file = file
        self._lock = threading.Lock()

    @staticmethod
    def open(folder: str, name: str) -> FileSpans:
        """Raises ConfigError if the file can't be written."""
        path = Path(folder) / f"{name}.jsonl"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return FileSpans(path, path.open("ab"))
        except OSError as error:
            raise ConfigError(
                f"telemetry.trace_folder is {folder!r}; {path} can't be written: {error.strerror}"
            ) from error

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        line = orjson.dumps(traces_data(spans), option=orjson.OPT_APPEND_NEWLINE)
        with self._lock:
            try:
                self._file.write(line)
                self._file.flush()
                if self._file.tell() > MAX_FILE_BYTES:
                    self._file.close()
                    self._path.replace(self._path.with_suffix(".1.jsonl"))
                    self._file = self._path.open("ab")
            except (OSError, ValueError):  # the disk is full, or the file could not be opened again
                return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        with self._lock:
            self._file.close()


def traces_data(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """Returns the OTLP `TracesData` of spans of one process as JSON has it: ids in hexadecimal,
    64-bit numbers as text.
    """
    return {
        "resourceSpans": [
            {
                "resource": {"attributes": _pairs(spans[0].resource.attributes)},
                "scopeSpans": [{"scope": {"name": SCOPE}, "spans": list(map(_document, spans))}],
            }
        ]
    }


def _document(span: ReadableSpan) -> dict[str, Any]:
    context, parent = span.context, span.parent
    document = {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "parentSpanId": "" if parent is None else f"{parent.span_id:016x}",
        "flags": int(context.trace_flags),
        "name": span.name,
        "kind": _KINDS[span.kind],
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _pairs(span.attributes),
    }
    if span.events:
        document["events"] = [
            {
                "name": event.name,
                "timeUnixNano": str(event.timestamp),
                "attributes": _pairs(event.attributes),
            }
            for event in span.events
        ]
    if span.status.status_code is StatusCode.ERROR:
        document["status"] = {
            "code": Status.STATUS_CODE_ERROR,
            "message": span.status.description or "",
        }
    return document


def _pairs(attributes: Attributes) -> list[dict[str, Any]]:
    return [{"key": name, "value": _value(value)} for name, value in _items(attributes)]


def _items(attributes: Attributes) -> Iterable[tuple[str, Any]]:
    return (attributes or {}).items()


def _value(value: Any) -> dict[str, Any]:  # noqa: ANN401 - a value of an attribute
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
    return {"stringValue": str(value)}
