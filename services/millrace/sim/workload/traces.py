"""Reads traces of requests: when they came, how long they were, what they were promised.

Trace files, plain or gzip, are told apart by their first line:

- Azure LLM inference: CSV with TIMESTAMP, ContextTokens, GeneratedTokens;
- Mooncake: JSON lines with timestamp (ms), input_length, output_length;
- QwenTrace (Qwen-Bailian): JSON lines with chat_id, parent_chat_id, timestamp (s), input_length,
  output_length, type, hash_ids; made single-turn as FlowPrefill (section 6.1, "Workloads") does;
- Vidur and Sarathi: CSV with num_prefill_tokens, num_decode_tokens, and arrived_at (s) or no times;
- Millrace's recordings of a live run (`--record`), with each request's class, objectives and key.

Prefix blocks (hash_ids) have no other use: every request is a single turn with a cold cache.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
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
        with io.TextIOWrapper(open_packed(path)) as lines:
            first = next(lines, "")
            is_recording = '"millrace_recording"' in first
            rows = list(_recorded_rows(path) if is_recording else _rows(first, lines))
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace {path}: {reason_of(error)}") from error
    except (ValueError, KeyError, TypeError, IndexError, RecordingError) as error:
        raise ConfigError(f"trace {path}: not a trace this command knows ({error})") from error
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


def _rows(first: str, others: Iterable[str]) -> Iterator[TraceRow]:
    if first.startswith("{"):
        entries = map(json.loads, filter(str.strip, itertools.chain([first], others)))
        yield from _qwen_rows(entries) if '"chat_id"' in first else _mooncake_rows(entries)
        return
    for entry in csv.DictReader(itertools.chain([first], others)):
        if "TIMESTAMP" in entry:
            arrival = datetime.fromisoformat(entry["TIMESTAMP"])
            seconds = (arrival - datetime(1970, 1, 1)).total_seconds()
            yield _row(seconds, entry["ContextTokens"], entry["GeneratedTokens"])
        else:
            arrived = entry.get("arrived_at")
            yield _row(
                None if arrived is None else float(arrived),
                entry["num_prefill_tokens"],
                entry["num_decode_tokens"],
            )


def _mooncake_rows(entries: Iterable[dict[str, Any]]) -> Iterator[TraceRow]:
    for entry in entries:
        yield _row(entry["timestamp"] / 1e3, entry["input_length"], entry["output_length"])


def _qwen_rows(entries: Iterable[dict[str, Any]]) -> Iterator[TraceRow]:
    """Reads a QwenTrace.

    A text turn of a chat keeps only the blocks that its parent's prompt lacked.

    Turns of the other types, and turns whose parent is not in the file, stay whole.
    """
    blocks: dict[int, int] = {}  # of each chat_id
    for entry in entries:
        own = blocks[entry["chat_id"]] = len(entry["hash_ids"])
        parent = blocks.get(entry["parent_chat_id"])
        tokens = entry["input_length"]
        if entry["type"] == "text" and parent is not None:
            tokens = _QWEN_BLOCK_TOKENS * (own - parent)
        yield _row(float(entry["timestamp"]), tokens, entry["output_length"], entry["type"])


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
    input_tokens: str | int,
    output_tokens: str | int,
    class_name: str = "",
) -> TraceRow:
    # A few rows of public traces have no input or no output; a request needs one token of each.
    return TraceRow(
        class_name=class_name,
        arrival_s=arrival_s,
        input_tokens=max(1, int(float(input_tokens))),
        output_tokens=max(1, int(float(output_tokens))),
    )
