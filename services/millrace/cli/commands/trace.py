"""`millrace trace`: the waterfall of a request from the files of `telemetry.trace_folder`."""

from __future__ import annotations

import html
import shutil
from collections.abc import Sequence
from pathlib import Path

from millrace.core.errors import MillraceError
from millrace.core.span import Span
from millrace.telemetry.trace import Waterfall
from millrace.telemetry.tracing.files import ReadSpan, read_trace

_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<meta name="viewport" content="width=device-width">
<style>
:root {{ color-scheme: light dark; font: 14px/1.4 system-ui, sans-serif; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: left; padding: 2px 8px; white-space: nowrap; }}
td.number {{ text-align: right; font-variant-numeric: tabular-nums; }}
td.bars {{ width: 60%; min-width: 240px; }}
tr:nth-child(even) {{ background: color-mix(in srgb, currentColor 5%, transparent); }}
.bar {{ display: block; height: 12px; min-width: 2px; background: #3b7dd8; }}
.failed {{ background: #c8322b; }}
details {{ white-space: normal; }}
</style>
<h1>{title}</h1>
<table><thead><tr><th scope="col">span<th scope="col">process<th scope="col">start, ms
<th scope="col">time, ms<th scope="col">from 0 to {total_ms:.1f} ms</tr></thead><tbody>
{rows}
</tbody></table>
"""


def show(folder: Path, wanted: str, page: Path | None) -> None:
    """Prints the waterfall of a trace, or writes it as a page.

    Raises MillraceError for an unknown trace, and a page that can't be written.
    """
    spans = read_trace(folder, wanted)
    if page is None:
        print(as_text(spans, shutil.get_terminal_size((120, 24)).columns))
        return
    try:
        page.write_text(as_page(spans), encoding="utf-8")
    except OSError as error:
        raise MillraceError(f"--html {page} can't be written: {error.strerror}") from error


def as_text(spans: Sequence[ReadSpan], width: int) -> str:
    """Draws the tree of spans with a bar each, as the waterfall of an answer."""
    begin_ns = min(span.start_ns for span in spans)
    bars = [
        Span(
            name="  " * span.depth + span.name + (" (failed)" if span.error else ""),
            instance_id=span.instance,
            start_s=(span.start_ns - begin_ns) / 1e9,
            end_s=(span.end_ns - begin_ns) / 1e9,
        )
        for span in spans
    ]
    named = {str(span.attributes.get("millrace.request_id", "")) for span in spans} - {""}
    title = f"{', '.join(sorted(named))}, trace {spans[0].trace_id}"
    drawn = Waterfall(request_id=title, arrival_unix_s=begin_ns / 1e9, spans=bars)
    return drawn.render(width, ordered=True)


def as_page(spans: Sequence[ReadSpan]) -> str:
    """Returns a page without scripts or other files: a table of spans with their attributes."""
    begin_ns = min(span.start_ns for span in spans)
    total_ns = max(1, max(span.end_ns for span in spans) - begin_ns)
    rows = "\n".join(_row(span, begin_ns, total_ns) for span in spans)
    title = html.escape(f"Trace {spans[0].trace_id}")
    return _PAGE.format(title=title, rows=rows, total_ms=total_ns / 1e6)


def _row(span: ReadSpan, begin_ns: int, total_ns: int) -> str:
    start_ns, took_ns = span.start_ns - begin_ns, span.end_ns - span.start_ns
    more = {**span.attributes, **({"error": span.error} if span.error else {})}
    said = "<br>".join(html.escape(f"{name}: {value}") for name, value in more.items())
    name = html.escape(span.name)
    shown = f"<details><summary>{name}</summary>{said}</details>" if said else name
    left, wide = 100 * start_ns / total_ns, 100 * took_ns / total_ns
    kind = "bar failed" if span.error else "bar"
    return (
        f'<tr><th scope="row" style="padding-left:{8 + 16 * span.depth}px">{shown}'
        f"<td>{html.escape(span.instance)}"
        f'<td class="number">{start_ns / 1e6:.1f}<td class="number">{took_ns / 1e6:.1f}'
        f'<td class="bars"><span class="{kind}" style="margin-left:{left:.2f}%;width:{wide:.2f}%">'
        "</span></tr>"
    )
