"""Reads traces from the files of `telemetry.trace_folder`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import orjson

from millrace.core.errors import MillraceError
from millrace.telemetry.tracing.finished import Attributes

_TRACE_ID: Final = re.compile(r"[0-9a-f]{32}")
_REQUEST_ID: Final = "millrace.request_id"
_TYPES: Final = {"stringValue": str, "intValue": int, "doubleValue": float, "boolValue": bool}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadSpan:
    """A span of a file. Times are Unix times in ns; `depth` counts the spans above it."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    service: str
    instance: str
    start_ns: int
    end_ns: int
    attributes: Attributes
    error: str
    depth: int = 0


def read_trace(folder: Path, wanted: str) -> list[ReadSpan]:
    """Returns the spans of a trace as a tree, every span before the spans below it.

    `wanted` is a trace id or the id of a request. Raises MillraceError if the folder has no such
    trace, or a file is no file of traces.
    """
    trace_id = wanted if _TRACE_ID.fullmatch(wanted) else _trace_of(folder, wanted)
    spans = [span for span in _spans(folder, trace_id) if span.trace_id == trace_id]
    if not spans:
        raise MillraceError(f"{folder} has no span of trace {trace_id}")
    return in_order(spans)


def in_order(spans: Iterable[ReadSpan]) -> list[ReadSpan]:
    """Returns the spans as a tree, siblings by their start; a span whose parent is missing (its
    process died, or the client has it) is at the top.
    """
    known = {span.span_id: span for span in spans}
    below: dict[str, list[ReadSpan]] = {}
    for span in sorted(known.values(), key=lambda one: (one.start_ns, one.end_ns)):
        below.setdefault(span.parent_id if span.parent_id in known else "", []).append(span)
    return list(_tree(below, "", 0))


def _tree(below: dict[str, list[ReadSpan]], span_id: str, depth: int) -> Iterator[ReadSpan]:
    for span in below.get(span_id, ()):
        yield ReadSpan(**{name: getattr(span, name) for name in _FIELDS} | {"depth": depth})
        yield from _tree(below, span.span_id, depth + 1)


_FIELDS: Final = tuple(name for name in ReadSpan.__slots__ if name != "depth")


def _trace_of(folder: Path, request_id: str) -> str:
    for span in _spans(folder, request_id):
        if span.attributes.get(_REQUEST_ID) == request_id:
            return span.trace_id
    raise MillraceError(
        f"{folder} has no trace of request {request_id!r}: it was not sampled, or its spans are "
        f"written later ({_REQUEST_ID} names a request)"
    )


def _spans(folder: Path, text: str) -> Iterator[ReadSpan]:
    """Yields the spans of all lines that have the text."""
    if not folder.is_dir():
        raise MillraceError(f"{folder} is no folder; telemetry.trace_folder names it")
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if text.encode() not in line:
                    continue
                try:
                    yield from _of_line(orjson.loads(line))
                except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
                    if not line.endswith(b"\n"):
                        continue  # it is being written
                    raise MillraceError(f"{path}, line {number}: no spans: {error!r}") from error


def _of_line(document: dict[str, Any]) -> Iterator[ReadSpan]:
    for resource in document["resourceSpans"]:
        of = _attributes(resource["resource"]["attributes"])
        for scope in resource["scopeSpans"]:
            for span in scope["spans"]:
                yield ReadSpan(
                    trace_id=span["traceId"],
                    span_id=span["spanId"],
                    parent_id=span["parentSpanId"],
                    name=span["name"],
                    service=str(of["service.name"]),
                    instance=str(of["service.instance.id"]),
                    start_ns=int(span["startTimeUnixNano"]),
                    end_ns=int(span["endTimeUnixNano"]),
                    attributes=_attributes(span["attributes"]),
                    error=span.get("status", {}).get("message", ""),
                )


def _attributes(pairs: Iterable[dict[str, Any]]) -> Attributes:
    found = {}
    for pair in pairs:
        ((kind, value),) = pair["value"].items()
        found[pair["key"]] = _TYPES[kind](value)
    return found
