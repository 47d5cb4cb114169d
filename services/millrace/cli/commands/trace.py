"""`millrace trace`: the waterfall of a request, from a gateway or from files of traces."""

from __future__ import annotations

import html
import shutil
from pathlib import Path
from urllib.parse import quote

import httpx
import orjson

from millrace.cli.commands.chat import GatewayError, refusal_of
from millrace.core.errors import MillraceError, reason_of
from millrace.core.span import Span
from millrace.telemetry.trace import Waterfall
from millrace.telemetry.tracing.files import read_trace

#: A waterfall is an answer from memory.
_TIMEOUT_S = 10.0

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
{tables}
"""

_TABLE = """<h1>{title}</h1>
<table><thead><tr><th scope="col">span<th scope="col">process<th scope="col">start, ms
<th scope="col">time, ms<th scope="col">from 0 to {total_ms:.1f} ms</tr></thead><tbody>
{rows}
</tbody></table>
"""


def read_gateway(url: str, api_key: str, request_id: str) -> list[Waterfall]:
    """Returns the waterfalls of a request that is open or ended lately, one for each prompt.

    Raises GatewayError with the gateway's message.
    """
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    path = f"{url.rstrip('/')}/v1/requests/{quote(request_id, safe='')}/trace"
    try:
        answer = httpx.get(path, headers=headers, timeout=_TIMEOUT_S)
    except (httpx.TransportError, httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
        raise GatewayError(f"no gateway at {url}: {reason_of(error)}") from error
    if answer.status_code != httpx.codes.OK:
        raise GatewayError(refusal_of(answer.content, answer.status_code))
    try:
        document = orjson.loads(answer.content)
        return [Waterfall.from_dict(one) for one in (document, *document.get("more", ()))]
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError) as error:
        raise GatewayError(f"{url} answered with no waterfall: {error!r}") from error


def read_folder(folder: Path, wanted: str) -> Waterfall:
    """Returns the spans of a trace as a tree; `wanted` is a request's id or a trace's.

    Raises MillraceError for an unknown trace, and a file that is no file of traces.
    """
    spans = read_trace(folder, wanted)
    begin_ns = min(span.start_ns for span in spans)
    bars = [
        Span(
            name="  " * span.depth + span.name,
            instance_id=span.instance,
            start_s=(span.start_ns - begin_ns) / 1e9,
            end_s=(span.end_ns - begin_ns) / 1e9,
            attributes={
                **{name: str(value) for name, value in span.attributes.items()},
                **({"error": span.error} if span.error else {}),
            },
        )
        for span in spans
    ]
    named = {str(span.attributes.get("millrace.request_id", "")) for span in spans} - {""}
    title = f"{', '.join(sorted(named))}, trace {spans[0].trace_id}"
    return Waterfall(request_id=title, arrival_unix_s=begin_ns / 1e9, spans=bars, ordered=True)


def show(waterfalls: list[Waterfall], page: Path | None) -> None:
    """Prints the waterfalls, or writes them as a page. Raises MillraceError for a bad path."""
    if page is None:
        width = shutil.get_terminal_size((120, 24)).columns
        print("\n\n".join(one.render(width) for one in waterfalls))
        return
    try:
        page.write_text(as_page(waterfalls), encoding="utf-8")
    except OSError as error:
        raise MillraceError(f"--html {page} can't be written: {error.strerror}") from error


def as_page(waterfalls: list[Waterfall]) -> str:
    """Returns a page without scripts or other files: tables of spans with their attributes."""
    tables = "\n".join(map(_table, waterfalls))
    title = html.escape(f"Request {waterfalls[0].request_id}")
    return _PAGE.format(title=title, tables=tables)


def _table(waterfall: Waterfall) -> str:
    total_s = max(1e-9, waterfall.end_s)
    rows = "\n".join(_row(span, total_s) for span in waterfall.in_order())
    title = html.escape(f"Request {waterfall.request_id}")
    return _TABLE.format(title=title, rows=rows, total_ms=total_s * 1e3)


def _row(span: Span, total_s: float) -> str:
    took_s = span.end_s - span.start_s
    said = "<br>".join(html.escape(f"{name}: {value}") for name, value in span.attributes.items())
    name = html.escape(span.name.lstrip())
    depth = (len(span.name) - len(span.name.lstrip())) // 2
    shown = f"<details><summary>{name}</summary>{said}</details>" if said else name
    left, wide = 100 * span.start_s / total_s, 100 * took_s / total_s
    kind = "bar failed" if "error" in span.attributes else "bar"
    return (
        f'<tr><th scope="row" style="padding-left:{8 + 16 * depth}px">{shown}'
        f"<td>{html.escape(span.instance_id)}"
        f'<td class="number">{span.start_s * 1e3:.1f}<td class="number">{took_s * 1e3:.1f}'
        f'<td class="bars"><span class="{kind}" style="margin-left:{left:.2f}%;width:{wide:.2f}%">'
        "</span></tr>"
    )
