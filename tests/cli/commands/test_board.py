"""`millrace board`: which files it opens, the page that it writes, its server."""

from __future__ import annotations

import json
import re
import threading

import httpx
import pytest
from typer.testing import CliRunner

from millrace.cli.commands.board import page_of, server_of, write_page
from millrace.cli.main import app
from millrace.core.board.events import BoardError
from millrace.core.config import SchedulerConfig
from millrace.core.scheduler.machine import Machine
from millrace.scheduler.observe.recording import Recording
from support.core_events import instance, request

HEAD = '{"millrace_board":1,"source":"simulation"}\n'


def held(page: str) -> list[dict]:
    """The lines in a page."""
    [text] = re.findall(r'id="recording">(.*?)</script>', page, re.DOTALL)
    return [json.loads(line) for line in text.strip().splitlines()]


def test_a_page_holds_the_lines_of_the_board(tmp_path):
    path = tmp_path / "b.jsonl"
    path.write_text(HEAD + '{"t":1.0,"kind":"gone","id":"p0"}\n')
    assert held(page_of(path))[1] == {"t": 1.0, "kind": "gone", "id": "p0"}


def test_a_recording_of_the_scheduler_is_replayed(tmp_path):
    path = tmp_path / "run.jsonl"
    recording = Recording(path, SchedulerConfig())
    step = recording.around(Machine(SchedulerConfig()).step)
    for event in (instance("p0"), instance("d0"), request("r")):
        step(event, 1.0)
    recording.close()
    head, *lines = held(page_of(path))
    assert (head["source"], head["title"]) == ("recording", "run.jsonl")
    assert [line["kind"] for line in lines][:4] == ["instance", "instance", "arrived", "placed"]


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ('{"t":1.0}\n', "names neither millrace_board"),
        ('{"millrace_board":7}\n', "millrace_board is 7"),
        ("hello\n", "line 1: no JSON"),
        ("[1]\n", "no JSON object"),
        ("", "names neither"),
    ],
)
def test_other_files_are_refused(tmp_path, text, wrong):
    path = tmp_path / "b.jsonl"
    path.write_text(text)
    with pytest.raises(BoardError, match=wrong):
        page_of(path)


def test_the_command_writes_one_page(tmp_path):
    path, out = tmp_path / "b.jsonl", tmp_path / "b.html"
    path.write_text(HEAD)
    done = CliRunner().invoke(app, ["board", str(path), "--html", str(out)])
    assert done.exit_code == 0 and held(out.read_text()) == [json.loads(HEAD)]
    with pytest.raises(BoardError, match="--html"):
        write_page("", tmp_path)


def test_the_server_answers_on_loopback_alone():
    with server_of("<p>page</p>", 0) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}"
            sent = httpx.get(f"{url}/", trust_env=False)
            assert (sent.status_code, sent.text) == (200, "<p>page</p>")
            assert "script-src" in sent.headers["content-security-policy"]
            assert httpx.get(f"{url}/etc/passwd", trust_env=False).status_code == 404
            with pytest.raises(BoardError, match=f"--port {server.server_port}: Address already"):
                server_of("", server.server_port)
        finally:
            server.shutdown()
            thread.join()
    assert server.server_address[0] == "127.0.0.1"
