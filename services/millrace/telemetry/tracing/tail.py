"""Keeps the spans of unsampled traces for a while: a slow or failed request's trace is wanted after
all.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from millrace.telemetry.tracing.finished import FinishedSpan

#: Wanted traces whose later spans are still expected.
_MOST_WANTED: Final = 4096


class TailBuffer:
    """Holds at most `most_spans` spans; the oldest trace makes room. On any thread."""

    def __init__(self, most_spans: int) -> None:
        self._most_spans = most_spans
        self._lock = threading.Lock()
        self._by_trace: OrderedDict[int, list[FinishedSpan]] = OrderedDict()
        self._held = 0
        self._wanted: OrderedDict[int, None] = OrderedDict()

    def __len__(self) -> int:
        """The spans that it holds."""
        return self._held

    def put(self, span: FinishedSpan) -> bool:
        """Holds a span, or returns True if its trace is wanted: the caller exports it."""
        with self._lock:
            if span.trace_id in self._wanted:
                return True
            self._by_trace.setdefault(span.trace_id, []).append(span)
            self._held += 1
            while self._held > self._most_spans:
                _, dropped = self._by_trace.popitem(last=False)
                self._held -= len(dropped)
        return False

    def wants(self, trace_id: int) -> bool:
        """Whether `want` was called for the trace lately."""
        return trace_id in self._wanted

    def want(self, trace_id: int) -> list[FinishedSpan]:
        """Returns the spans of a trace that it holds; later spans of the trace are wanted, too."""
        with self._lock:
            self._wanted[trace_id] = None
            if len(self._wanted) > _MOST_WANTED:
                self._wanted.popitem(last=False)
            found = self._by_trace.pop(trace_id, [])
            self._held -= len(found)
        return found
