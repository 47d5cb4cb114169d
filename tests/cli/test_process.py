"""The start and the end of commands' processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from millrace.cli.process import plain_errors, reach_this_machine_directly, tell
from millrace.core.errors import MillraceError
from support.deadlines import HANG_S


def test_the_port_is_told_once() -> None:
    read_fd, write_fd = os.pipe()
    tell(write_fd)(8000)
    with os.fdopen(read_fd, "rb") as told:
        assert json.loads(told.read()) == {"port": 8000}


def test_a_port_that_nobody_waits_for_any_more_is_no_error() -> None:
    """The parent is about to end the process. Click would exit silently with status 1."""
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    tell(write_fd)(8000)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(write_fd)


def test_an_error_is_one_line_outside_of_a_command_too(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, plain_errors():
        raise MillraceError("store.url is 'x'")
    assert ended.value.code == 1
    assert capsys.readouterr().err == "millrace: store.url is 'x'\n"


@pytest.mark.parametrize(
    ("excepted", "then"),
    [
        ({}, "localhost,127.0.0.1,::1"),
        ({"NO_PROXY": "example.org, localhost"}, "example.org,localhost,127.0.0.1,::1"),
        ({"no_proxy": "a", "NO_PROXY": "b"}, "a,localhost,127.0.0.1,::1"),
        ({"no_proxy": "*"}, "*"),
    ],
)
def test_no_http_proxy_stands_before_this_machine(
    monkeypatch: pytest.MonkeyPatch, excepted: dict[str, str], then: str
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in excepted.items():
        monkeypatch.setenv(name, value)
    reach_this_machine_directly()
    assert os.environ["no_proxy"] == then


class Gateway(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(404)
        self.end_headers()
        self.wfile.write(b'{"error": {"message": "a gateway of this machine"}}')


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_command_asks_a_gateway_of_this_machine_itself(host: str) -> None:
    """Nobody is where the HTTP proxy should be."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as server:
        Thread(target=server.serve_forever).start()
        url = f"http://{host}:{server.server_port}"
        command = [sys.executable, "-m", "millrace", "trace", "a", "--url", url]
        env = {**os.environ, "http_proxy": "http://127.0.0.1:9", "no_proxy": "", "NO_PROXY": ""}
        said = subprocess.run(command, env=env, capture_output=True, text=True, timeout=HANG_S)
        server.shutdown()
    assert "a gateway of this machine" in said.stderr


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full, which Linux has")
@pytest.mark.parametrize(
    "arguments",
    [
        ("config",),
        *(
            ("sim", "run", "--mix", "qwen", "--rate", "5", "--requests", "3", *more)
            for more in ((), ("--records", "/dev/full"))
        ),
    ],
)
def test_a_full_disk_is_one_line(arguments: tuple[str, ...]) -> None:
    with FULL.open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "millrace", *arguments],
            stdout=subprocess.DEVNULL if "--records" in arguments else full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode == 1
    assert ended.stderr == "millrace: can't write the output: No space left on device\n"


@pytest.mark.parametrize("arguments", [("--help",), ("sim", "run", "--help"), ("config",)])
def test_a_reader_that_has_seen_enough_is_no_error(arguments: tuple[str, ...]) -> None:
    """As in `millrace --help | head`. To close a pipe's other end is not enough: a process that
    another thread starts just then may have a copy of it.
    """
    output, reader = socket.socketpair()
    with output, reader:
        reader.shutdown(socket.SHUT_RD)
        ended = subprocess.run(
            [sys.executable, "-m", "millrace", *arguments],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (ended.returncode, ended.stderr) == (1, "")


SHOWS_STANDARD_FILES = """
import os, subprocess, sys
from millrace.cli.process import open_standard_files
open_standard_files()
print("lost"), print("lost", file=sys.stderr), sys.stdout.flush(), sys.stdin.read()
files = [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
child = subprocess.run([sys.executable, "-c", "import os; os.fstat(0), os.fstat(1), os.fstat(2)"])
with open(sys.argv[1], "w") as shown:
    shown.write(f"{files} {child.returncode}")
"""


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_standard_files_are_null(closed: str, tmp_path: Path) -> None:
    """Else the next file that the process opens has the number, and gets what is printed."""
    shown = tmp_path / "shown"
    line = f'exec "$@" {closed}'
    ended = subprocess.run(
        ["sh", "-c", line, "sh", sys.executable, "-c", SHOWS_STANDARD_FILES, str(shown)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        check=False,
    )
    assert ended.returncode == 0
    assert shown.read_text() == f"{['/dev/null'] * 3} 0"


def test_a_command_runs_with_its_output_closed() -> None:
    ended = subprocess.run(
        ["sh", "-c", 'exec "$@" >&-', "sh", sys.executable, "-m", "millrace", "config"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_text_beyond_the_output_s_encoding_is_no_error() -> None:
    """Answers and names have any characters; a terminal or a pipe may know few of them."""
    code = "from millrace.cli.process import write_any_text as w; w(); print('cos\u00ec \u2026')"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (ended.stdout, ended.stderr) == ("cos? ?\n", "")
