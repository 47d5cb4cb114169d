"""Reads traces of requests: when they came, how long they were, what they were promised.

Trace files, plain or gzip, are told apart by their first line:

- Azure LLM inference: CSV with TIMESTAMP (UTC unless it has an offset), ContextTokens,
  GeneratedTokens;
- Mooncake: JSON lines with timestamp (ms), input_length, output_length;
- QwenTrace (Qwen-Bailian): JSON lines with chat_id, parent_chat_id, timestamp (s), input_length,
  output_length, type, hash_ids; made single-turn as FlowPrefill (section 6.1, "Workloads") does;
- Vidur and Sarathi: CSV with num_prefill_tokens, num_decode_tokens, and arrived_at (s) or no times;
- CSV and Mooncake's lines may have a `class`, the name of the request's class;
- Millrace's recordings of a live run (`--record`), with each request's class, objectives and key.

Prefix blocks (hash_ids) have no other use: every request is a single turn with a cold cache.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from millrace.core.errors import ConfigError, reason_of
from millrace.core.request import Request, Slo
from millrace.core.scheduler.events import Reported, Submitted
from millrace.core.scheduler.recording import RecordingError
from millrace.core.scheduler.reports import RequestFinished
from millrace.core.weights import DEFAULT_TENANT
from millrace.sim.packed import open_packed

_QWEN_BLOCK_TOKENS = 16

#: The names of the events of a recording that tell of a request's lengths.
_TELLING = ("Submitted", "Reported")


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceRow:
    """One request of a trace; `arrival_s` counts from the first request, None where there are no
    times.

    `class_name` is empty where the trace does not tell kinds of request apart. `slo`: the request's
    own objectives; None where the trace has none.
    """

    arrival_s: float | None
    input_tokens: int
    output_tokens: int
    class_name: str = ""
    slo: Slo | None = None
    tenant: str = DEFAULT_TENANT


def read_trace(path: Path) -> list[TraceRow]:
    """Reads a trace, ordered by arrival. Raises ConfigError for a file that is no trace."""
    try:
        with io.TextIOWrapper(open_packed(path), encoding="utf-8-sig") as lines:
            first = next(lines, "")
            is_recording = '"millrace_recording"' in first
            rows = list(_recorded_rows(path) if is_recording else _rows(first, lines))
    except _WrongLine as error:
        raise ConfigError(f"trace {path}, {error}") from error
    except (OSError, EOFError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"trace {path}: {reason_of(error)}") from error
    except (ValueError, KeyError, TypeError, IndexError, RecordingError) as error:
        raise ConfigError(f"trace {path}: a recording that can't be read ({error})") from error
    if not rows:
        raise ConfigError(f"trace {path}: holds no requests")
    if rows[0].arrival_s is None:
        return rows
    rows.sort(key=_arrival_s)
    return _from(rows, _arrival_s(rows[0]))


def cut_window(rows: Sequence[TraceRow], start_s: float, end_s: float) -> list[TraceRow]:
    """The rows that arrive from `start_s` to `end_s`, both included; arrivals count from `start_s`.

    Raises ConfigError when the trace has no times, or none in the window.
    """
    found = [row for row in rows if start_s <= _arrival_s(row) <= end_s]
    if not found or found[0].arrival_s is None:
        raise ConfigError(
            f"--window {start_s:g}:{end_s:g}: no request of the trace arrives in it, in seconds"
        )
    return _from(found, start_s)


def _from(rows: Iterable[TraceRow], start_s: float) -> list[TraceRow]:
    return [replace(row, arrival_s=_arrival_s(row) - start_s) for row in rows]


def _arrival_s(row: TraceRow) -> float:
    return row.arrival_s or 0.0


class _WrongLine(ConfigError):
    """A line of a trace is wrong. The message begins with its number."""


#: What a value has to be, and its reader, which raises ValueError or TypeError for another.
_Reader = tuple[str, Callable[[Any], Any]]


def _unix_s(text: str) -> float:
    at = datetime.fromisoformat(text)
    return (at.replace(tzinfo=UTC) if at.tzinfo is None else at).timestamp()


def _tokens(value: str | int) -> int:
    tokens = int(float(value))
    if tokens < 0:
        raise ValueError
    return tokens


def _seconds(value: str | float) -> float:
    seconds = float(value)
    if not math.isfinite(seconds):
        raise ValueError
    return seconds


def _id(value: Any) -> str | int:  # noqa: ANN401 - any JSON
    if not isinstance(value, str | int):
        raise TypeError
    return value


def _text(value: Any) -> str:  # noqa: ANN401 - any JSON
    if not isinstance(value, str):
        raise TypeError
    return value


_TIME: _Reader = ("a time such as 2023-11-16 18:17:03.97", _unix_s)
_TOKENS: _Reader = ("a number of tokens, at least 0", _tokens)
_SECONDS: _Reader = ("a number", _seconds)
_ID: _Reader = ("a number or a text", _id)

_AZURE = {"TIMESTAMP": _TIME, "ContextTokens": _TOKENS, "GeneratedTokens": _TOKENS}
_LENGTHS = {"num_prefill_tokens": _TOKENS, "num_decode_tokens": _TOKENS}
_TIMED_LENGTHS = {"arrived_at": _SECONDS, **_LENGTHS}
_MOONCAKE = {"timestamp": _SECONDS, "input_length": _TOKENS, "output_length": _TOKENS}
_CLASS = {"class": ("a text", _text)}
_QWEN = {
    "chat_id": _ID,
    "parent_chat_id": _ID,
    "type": ("a text", _text),
    "hash_ids": ("a list", len),
    **_MOONCAKE,
}


def _rows(first: str, others: Iterable[str]) -> Iterator[TraceRow]:
    lines = itertools.chain([first], others)
    if first.startswith("{"):
        entries = _json_lines(lines)
        yield from _qwen_rows(entries) if '"chat_id"' in first else _mooncake_rows(entries)
        return
    reader = csv.DictReader(lines)
    columns = set(reader.fieldnames or ())
    for fields in (_AZURE, _TIMED_LENGTHS, _LENGTHS):
        if columns >= fields.keys():
            for entry in reader:
                *arrival_s, tokens, output = _values(reader.line_num, entry, fields)
                at_s = arrival_s[0] if arrival_s else None
                yield _row(at_s, tokens, output, _class_name(reader.line_num, entry))
            return
    if columns:
        csvs = " or ".join(",".join(fields) for fields in (_AZURE, _LENGTHS, _TIMED_LENGTHS))
        raise _WrongLine(
            f"line 1: {first.strip()[:80]!r} begins no trace: that is CSV with the columns {csvs}, "
            f"JSON lines with {', '.join(_MOONCAKE)}, or a recording of --record"
        )


def _json_lines(lines: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yields the objects with the numbers of their lines."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                entry = json.loads(line)
            except json.JSONDecodeError as error:
                where = f"line {number}, character {error.pos + 1}"
                raise _WrongLine(f"{where}: not JSON: {error.msg}") from error
            if not isinstance(entry, dict):
                raise _WrongLine(f"line {number}: {line.strip()[:80]!r} is no JSON object")
            yield number, entry


def _values(number: int, entry: Mapping[str, Any], fields: Mapping[str, _Reader]) -> list[Any]:
    """Returns the values of the fields. Raises _WrongLine naming the first wrong value."""
    found = []
    for name, (wanted, read) in fields.items():
        try:
            found.append(read(entry[name]))
        except (KeyError, ValueError, TypeError, OverflowError):
            if entry.get(name) is None:
                raise _WrongLine(f"line {number}: {name} is missing") from None
            raise _WrongLine(
                f"line {number}: {name} is {entry[name]!r}; it must be {wanted}"
            ) from None
    return found


def _class_name(number: int, entry: Mapping[str, Any]) -> str:
    """Returns the class of a row; empty where it has none."""
    return _values(number, entry, _CLASS)[0] if entry.get("class") is not None else ""


def _mooncake_rows(entries: Iterable[tuple[int, Mapping[str, Any]]]) -> Iterator[TraceRow]:
    for number, entry in entries:
        at_ms, tokens, output = _values(number, entry, _MOONCAKE)
        yield _row(at_ms / 1e3, tokens, output, _class_name(number, entry))


def _qwen_rows(entries: Iterable[tuple[int, Mapping[str, Any]]]) -> Iterator[TraceRow]:
    """Reads a QwenTrace.

    A text turn of a chat keeps only the blocks that its parent's prompt lacked.

    Turns of the other types, and turns whose parent is not in the file, stay whole.
    """
    blocks: dict[Any, int] = {}  # of each chat_id
    for number, entry in entries:
        chat, before, kind, own, at_s, tokens, output = _values(number, entry, _QWEN)
        blocks[chat] = own
        parent = blocks.get(before)
        if kind == "text" and parent is not None:
            tokens = _QWEN_BLOCK_TOKENS * (own - parent)
        yield _row(at_s, tokens, output, kind)


def _recorded_rows(path: Path) -> Iterator[TraceRow]:
    """Reads a recording of a live run.

    A request that did not end with an answer (it was refused, or failed, or the recording ends)
    has as many tokens of output as it may have had at most.
    """
    from millrace.sim.recordings import RecordingLines  # loads orjson, which --help can do without

    asked: dict[str, tuple[float, Request]] = {}
    generated: dict[str, int] = {}
    lines = RecordingLines(path)
    for line in lines:
        if line["event"][0] not in _TELLING:
            continue
        now_s, event, _ = lines.step(line)
        if isinstance(event, Submitted):
            asked.setdefault(event.request.id, (now_s, event.request))
        elif isinstance(event, Reported) and isinstance(event.report, RequestFinished):
            generated[event.report.request_id] = event.report.generated_tokens
    for id_, (now_s, request) in asked.items():
        yield TraceRow(
            arrival_s=now_s,
            input_tokens=request.prompt_tokens,
            output_tokens=max(1, generated.get(id_, request.max_new_tokens)),
            class_name=request.slo.class_name,
            slo=request.slo,
            tenant=request.tenant,
        )


def _row(
    arrival_s: float | None,
    input_tokens: int,
    output_tokens: int,
    class_name: str = "",
) -> TraceRow:
    # A few rows of public traces have no input or no output; a request needs one token of each.
    return TraceRow(
        class_name=class_name,
        arrival_s=arrival_s,
        input_tokens=max(1, input_tokens),
        output_tokens=max(1, output_tokens),
    )
