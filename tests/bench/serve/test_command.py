"""`millrace bench serve` as a user types it, against a small local server."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

from millrace.bench.serve.command import command
from support.sse_server import SseServer, running

_app = typer.Typer()
_app.command()(command)


async def _command(*arguments):
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-c",
        "import typer; from millrace.bench.serve.command import command; typer.run(command)",
        *arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_the_command_writes_json_and_a_picture(tmp_path):
    async with running(SseServer(0.01, 0.002)) as server:
        status, out, err = await _command(
            *("--url", server.url, "--requests", "8", "--rate", "200"),
            *("--input-tokens", "lognormal:30:10", "--output-tokens", "3"),
            *("--slo-class", "chat:500:100:3", "--slo-class", "doc:9000:0"),
            *("--json", str(tmp_path / "out.json"), "--records"),
            *("--plot", str(tmp_path / "out.png"), "--api-key", "secret"),
        )
    assert status == 0, err
    assert "8 of 8 requests succeeded" in out
    document = json.loads((tmp_path / "out.json").read_text())
    assert "secret" not in json.dumps(document)
    assert document["settings"]["rate"] == 200
    assert document["results"]["total"]["attainment"] == 1.0
    assert len(document["requests"]) == 8
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")
    assert {h["authorization"] for h in server.headers} == {"bearer secret"}


async def unavailable(exchange):
    exchange.send_json({"error": {"message": "no", "type": "server_error"}}, 503)


async def test_the_command_fails_when_everything_does():
    async with running(SseServer(answer=unavailable)) as server:
        status, out, _ = await _command("--url", server.url, "--requests", "2")
    assert status == 1
    assert "2 x http 503" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rate", "1", "--concurrency", "2"], "exclude each other"),
        (["--token-ids", "9:1"], "LOW:HIGH"),
        (["--slo-class", "x"], "--slo-class"),
        (["--input-tokens", "x"], "--input-tokens"),
    ],
)
def test_bad_options_are_one_clear_line(arguments, said):
    result = CliRunner().invoke(_app, arguments)
    assert result.exit_code == 1
    assert said in result.output.replace("\n", " ")
