"""`millrace trace`: reads the files that the processes of a stack write."""

from __future__ import annotations

import asyncio
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from millrace.cli.commands.chat import GatewayError
from millrace.cli.commands.trace import as_page, read_folder, read_gateway, show
from millrace.core.config import TelemetryConfig
from millrace.core.errors import MillraceError
from millrace.core.span import Span
from millrace.telemetry.tracing.files import read_trace
from millrace.telemetry.tracing.tracer import open_tracer
from support.gateway import MODEL, Script, gateway

ARRIVAL_S = 1_700_000_000.0


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The spans of two requests at a proxy and an instance, as they write them."""
    config = TelemetryConfig(trace_folder=str(tmp_path), trace_ratio=1.0)
    proxy = open_tracer(config, "proxy", "proxy-0")
    worker = open_tracer(config, "prefill", "prefill-0")
    for number in range(2):
        name = {"millrace.request_id": f"r<{number}>"}
        request = proxy.begin("", ARRIVAL_S)
        prefill = worker.scope(request.context.traceparent, ARRIVAL_S)
        prefill.child("chunk", 0.2, 0.3, {"millrace.tokens": 512})
        prefill.child("waiting", 0.1, 0.2)
        prefill.end("prefill", 0.1, 0.4, name, error="no room" if number else "")
        request.end("request", 0.0, 0.5, name)
    proxy.close()
    worker.close()
    return tmp_path


def test_spans_are_a_tree_across_files(folder: Path) -> None:
    spans = read_trace(folder, "r<0>")
    assert [(span.depth, span.name, span.instance) for span in spans] == [
        (0, "request", "proxy-0"),
        (1, "prefill", "prefill-0"),
        (2, "waiting", "prefill-0"),
        (2, "chunk", "prefill-0"),
    ]
    assert spans[3].attributes == {"millrace.tokens": 512}
    assert spans[3].end_ns - spans[0].start_ns == 300_000_000
    assert read_trace(folder, spans[0].trace_id) == spans


def test_the_waterfall_is_drawn(folder: Path) -> None:
    spans = read_trace(folder, "r<1>")
    title, head, *rows = read_folder(folder, "r<1>").render(90).splitlines()
    assert title == f"request r<1>, trace {spans[0].trace_id}: 500.0 ms"
    assert head.split() == ["span", "instance", "start", "end", "ms"]
    assert rows[0].split()[0] == "request"
    assert rows[1].startswith("  prefill (failed)")
    assert rows[3].split()[:4] == ["chunk", "prefill-0", "200.0", "300.0"]
    bar = rows[3].split("|")[1]
    assert 0.35 < bar.index("#") / len(bar) < 0.45


class Cells(HTMLParser):
    """The text of a page, and the attributes of its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.text = ""
        self.elements: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_the_page_stands_alone(folder: Path, tmp_path: Path) -> None:
    page = as_page([read_folder(folder, "r<1>")])
    found = Cells()
    found.feed(page)
    assert "millrace.request_id: r<1>" in found.text and "r<1>" not in page
    assert "error: no room" in found.text
    assert not {"script", "link", "img", "iframe"} & {tag for tag, _ in found.elements}
    assert not re.search(r"https?:|url\(", page)
    bars = [one for tag, one in found.elements if tag == "span"]
    assert [bar["class"] for bar in bars] == ["bar", "bar failed", "bar", "bar"]
    assert bars[3]["style"] == "margin-left:40.00%;width:20.00%"
    show([read_folder(folder, "r<1>")], tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == page


async def test_a_gateway_is_asked_for_the_waterfall(tmp_path: Path) -> None:
    bar = Span(name="chunk", instance_id="prefill-0", start_s=0.1, end_s=0.2)
    async with gateway(tmp_path) as stack:
        stack.fleet.script = Script(spans=[bar])
        body = {"model": MODEL, "prompt": ["one", "two"]}
        answer = (await stack.http.post("/v1/completions", json=body)).json()
        url = str(stack.http.base_url)
        found = await asyncio.to_thread(read_gateway, url, "", answer["id"])
        for wrong in ("nothing", "a/b", "é"):
            with pytest.raises(GatewayError, match=r"not found|No route"):
                await asyncio.to_thread(read_gateway, url, "", wrong)
    assert [one.request_id for one in found] == [f"{answer['id']}-0", f"{answer['id']}-1"]
    rows = found[0].render(90).splitlines()[2:]
    names = {"tokenise", "record", "place", "answer", "chunk"}  # the order is that of begins
    assert {row.split()[0] for row in rows} == names and len(rows) == len(names)
    with pytest.raises(GatewayError, match="no gateway at"):
        read_gateway("ftp://127.0.0.1:1", "", "r")


def test_an_unknown_trace_is_named(folder: Path) -> None:
    with pytest.raises(MillraceError, match="no trace of request 'r7'"):
        read_trace(folder, "r7")
    with pytest.raises(MillraceError, match=f"no span of trace {'a' * 32}"):
        read_trace(folder, "a" * 32)
    with pytest.raises(MillraceError, match="is no folder"):
        read_trace(folder / "none", "r7")


def test_a_line_that_is_no_span_is_named(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"r<0>": 1}\n')
    with pytest.raises(MillraceError, match=r"a\.jsonl, line 1: no spans"):
        read_trace(folder, "r<0>")


def test_a_line_that_is_being_written_is_left_out(folder: Path) -> None:
    (folder / "a.jsonl").write_text('{"r<0>": 1')
    assert len(read_trace(folder, "r<0>")) == 4
