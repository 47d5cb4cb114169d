"""The commands a new user types, with the model that ships."""

import asyncio
import os
import re
import signal
import sys
from pathlib import Path

import httpx
import psutil
import pytest

from millrace.local.authority import as_toml, issue_certificates
from support.command import millrace, start
from support.deadlines import HANG_S


async def test_the_demo_answers_explains_and_ends_clean() -> None:
    status, text = await millrace("demo", timeout_s=3 * HANG_S)
    assert status == 0, text
    assert text.count("time to first token") == 5
    assert text.count("first_decode_step") == 5
    assert "chunk 2" in text  # the long document takes several passes
    assert "Stopped clean" in text


async def test_up_says_what_to_try_between_services_with_tls_and_ends_clean_at_ctrl_c() -> None:
    process = await start("up", "--port", "0", "--prefill", "1", "--no-profile", "--tls")
    assert process.stdout is not None
    seen = ""
    try:
        while "Ctrl-C stops everything" not in seen:
            seen += (await asyncio.wait_for(process.stdout.readline(), HANG_S)).decode()
        url = re.search(r"http://127\.0\.0\.1:\d+", seen)
        assert url is not None
        assert "curl " in seen and "from openai import OpenAI" in seen
        body = re.search(r"-d '(\{.*?\})'", seen, re.DOTALL)
        assert body is not None
        async with httpx.AsyncClient(base_url=url.group(), timeout=2 * HANG_S) as client:
            headers = {"content-type": "application/json"}
            answer = await client.post("/v1/chat/completions", content=body[1], headers=headers)
            assert answer.status_code == 200
            assert answer.text.rstrip().endswith("data: [DONE]")
            status, said = await millrace("chat", "Who are you?", "--url", url.group(), "--trace")
            assert status == 0
            assert "kv_transfer" in said
        command = re.search(r"millrace (fleet --scheduler \S+ --config \S+)", seen)
        assert command is not None
        status, said = await millrace(*command[1].split())
        assert status == 0 and "prefill-0" in said and "decode-0" in said
        stranger = command[1].partition(" --config")[0]  # shows no certificate
        status, said = await millrace(*stranger.split())
        assert status == 1 and "prefill-0" not in said
    finally:
        process.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(process.wait(), HANG_S) == 0


@pytest.mark.parametrize("last_line", ["starting", "Ctrl-C stops everything"])
async def test_up_ends_clean_when_its_terminal_is_closed(tmp_path: Path, last_line: str) -> None:
    ours, theirs = os.openpty()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _IN_TERMINAL, sys.executable, "-m", "millrace", "up"),
        *("--port", "0", "--no-profile"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "COLUMNS": "120", "TMPDIR": str(tmp_path)},
        start_new_session=True,
    )
    os.close(theirs)
    seen = ""
    while last_line not in seen:
        seen += (await asyncio.to_thread(os.read, ours, 1 << 16)).decode(errors="replace")
    children = psutil.Process(process.pid).children(recursive=True)
    if last_line != "starting":
        assert len(children) > 4
        [folder] = os.listdir(tmp_path)
        assert {"proxy.log", "prefill-0.log"} <= set(os.listdir(tmp_path / folder))
    os.close(ours)
    assert await asyncio.wait_for(process.wait(), HANG_S) == 0
    assert not os.listdir(tmp_path)
    psutil.wait_procs(children, HANG_S)
    assert not [one for one in children if one.is_running()]


#: Makes the terminal on standard input the session's own, as a shell's is, and becomes a command
#: that hears of its end, also where the tests run under `nohup`.
_IN_TERMINAL = """
import fcntl, os, signal, sys, termios
signal.signal(signal.SIGHUP, signal.SIG_DFL)
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


async def test_chat_without_a_gateway_says_so_in_one_line() -> None:
    status, said = await millrace("chat", "hello", "--url", "http://127.0.0.1:9")
    assert status == 1
    assert said.count("\n") == 1
    assert "no gateway at http://127.0.0.1:9" in said


async def test_a_setting_out_of_range_is_named() -> None:
    status, said = await millrace("up", "--set", "engine.page_tokens=-1")
    assert status == 1
    assert "engine.page_tokens is -1; it must be between 0 and 1024" in said


async def test_up_makes_no_certificates_beside_others(tmp_path: Path) -> None:
    given = as_toml(issue_certificates(tmp_path / "tls"))
    (tmp_path / "settings.toml").write_text(given)
    status, said = await millrace("up", "--tls", "--config", str(tmp_path / "settings.toml"))
    assert status == 2
    assert "--tls makes certificates, and tls.ca_file is" in " ".join(said.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kvp", "--model", "nowhere", "--stages", "2"), "--stages is for instances with weights"),
        (("up", "--colocated", "1", "--stages", "2"), "engine.stages is 2; a pair of instances"),
    ],
)
async def test_stages_are_refused_where_there_are_none(arguments, message) -> None:
    status, said = await millrace(*arguments)
    assert status == 2
    assert message in " ".join(said.replace("│", " ").split())
