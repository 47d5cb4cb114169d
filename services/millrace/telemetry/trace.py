"""The TTFT waterfall: the time that each step of a request took, as text, JSON and OpenTelemetry
spans.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.core.span import Span

_SHORTEST_S = 1e-9  # seconds: clocks distinguish no less
_MIN_BAR = 8  # columns


@dataclass(slots=True, kw_only=True)
class Waterfall:
    """A request's spans. `arrival_unix_s` is its arrival at the proxy, in Unix seconds.

    `ordered`: the spans are a tree, and stay in their order; else they are shown by their starts.
    """

    request_id: str
    arrival_unix_s: float
    spans: list[Span] = field(default_factory=list)
    ordered: bool = False

    def add(self, spans: Iterable[Span]) -> None:
        self.spans.extend(spans)

    @property
    def end_s(self) -> float:
        """Returns the end of the last span, in seconds since arrival; 0 without spans."""
        return max((span.end_s for span in self.spans), default=0.0)

    def in_order(self) -> list[Span]:
        if self.ordered:
            return list(self.spans)
        return sorted(self.spans, key=lambda span: (span.start_s, span.end_s))

    def render(self, width: int = 100) -> str:
        """Draws a picture `width` columns wide: name, instance, start and end in ms, and a bar
        each.

        Bars share one scale, from arrival to the last end. The picture is wider than `width` only
        when the names leave no room for a bar of 8 columns.
        """
        spans = self.in_order()
        rows = [
            (_named(span), span.instance_id, f"{span.start_s * 1e3:.1f}", f"{span.end_s * 1e3:.1f}")
            for span in spans
        ]
        header = ("span", "instance", "start", "end ms")
        columns = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
        room = max(_MIN_BAR, width - sum(columns) - 2 * len(columns) - 2)
        lines = [f"request {self.request_id}: {self.end_s * 1e3:.1f} ms", _row(header, columns, "")]
        for span, row in zip(spans, rows, strict=True):
            lines.append(_row(row, columns, f"|{_bar(span, self.end_s, room)}|"))
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON document; `from_dict` reads it back."""
        return {
            "request_id": self.request_id,
            "arrival_unix_s": self.arrival_unix_s,
            "spans": [
                {
                    "name": span.name,
                    "instance_id": span.instance_id,
                    "start_s": span.start_s,
                    "end_s": span.end_s,
                    "attributes": dict(span.attributes),
                }
                for span in self.in_order()
            ],
        }

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Waterfall:
        """Reads a document of `to_dict`. Raises KeyError or TypeError for a document of another
        shape.
        """
        return cls(
            request_id=document["request_id"],
            arrival_unix_s=document["arrival_unix_s"],
            spans=[Span(**span) for span in document["spans"]],
        )


def _named(span: Span) -> str:
    return f"{span.name} (failed)" if "error" in span.attributes else span.name


def _row(cells: tuple[str, ...], columns: list[int], bar: str) -> str:
    name, instance, start, end = cells
    return (
        f"{name:<{columns[0]}}  {instance:<{columns[1]}}  {start:>{columns[2]}}  "
        f"{end:>{columns[3]}}  {bar}"
    ).rstrip()


def _bar(span: Span, total_s: float, room: int) -> str:
    """Draws at least one mark, inside `room` columns that stand for [0, total_s]."""
    scale = room / total_s if total_s > _SHORTEST_S else 0.0
    first = min(room - 1, max(0, math.floor(span.start_s * scale)))
    last = min(room, max(first + 1, math.ceil(span.end_s * scale)))
    return " " * first + "#" * (last - first) + " " * (room - last)
