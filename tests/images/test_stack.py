"""A stack of the images of `make images`: `make test-images`.

See docs/guides/images.md.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from images.image_runner import Runner, find_runner
from millrace.local.private_redis import find_redis_server
from millrace.version import version
from support.deadlines import HANG_S

pytestmark = [
    pytest.mark.skipif(
        not os.environ.get("MILLRACE_TEST_IMAGES"), reason="images: `make test-images` runs these"
    ),
    pytest.mark.timeout(900),
]

#: Only a hang exceeds it: images start on busy machines, too.
START_S = 300.0
MODEL = "/usr/share/millrace/models/millrace-tiny"


def image(role: str) -> str:
    registry = os.environ.get("REGISTRY", "")
    return f"{registry + '/' if registry else ''}millrace-{role}:{version()}"


def free_ports(count: int) -> list[int]:
    """Returns ports of the loopback that were free at the same time."""
    with contextlib.ExitStack() as kept:
        sockets = [kept.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    found, refusals = find_runner(image("proxy"))
    if found is None:
        pytest.skip("no engine runs the images: " + "; ".join(refusals))
    print(f"images run by {found.tool}", *(f"(not by {reason})" for reason in refusals), sep="\n")
    yield found
    found.remove_leftovers()


@contextlib.contextmanager
def running(log: Path, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """Runs a process in a group of its own, with its output in `log`; ends it and its children."""
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        yield process
    finally:
        for sent in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, sent)
                process.wait(HANG_S)


@pytest.fixture(scope="module")
def gateway(runner: Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """Yields the proxy of a stack of images once it serves."""
    folder = tmp_path_factory.mktemp("images")
    redis, scheduler, proxy, *metrics = free_ports(7)
    with contextlib.ExitStack() as stack:
        processes: dict[str, subprocess.Popen[bytes]] = {}

        def start(name: str, command: list[str]) -> None:
            processes[name] = stack.enter_context(running(folder / f"{name}.log", command))

        server = [str(find_redis_server()), "--port", str(redis), "--bind", "127.0.0.1"]
        start("redis", [*server, "--save", "", "--dir", str(folder)])
        own = {
            "scheduler": ["--port", str(scheduler)],
            "prefill": ["--model", MODEL, "--scheduler", f"127.0.0.1:{scheduler}"],
            "decode": ["--model", MODEL, "--scheduler", f"127.0.0.1:{scheduler}"],
            "proxy": ["--model", MODEL, "--scheduler", f"127.0.0.1:{scheduler}"],
        }
        own["proxy"] += ["--port", str(proxy)]
        env = {"MILLRACE_STORE__URL": f"redis://127.0.0.1:{redis}/0"}
        env |= {"MILLRACE_ENGINE__DEVICE": "cpu", "MILLRACE_ENGINE__KV_BYTES": str(64 << 20)}
        for (role, arguments), port in zip(own.items(), metrics, strict=True):
            given = {**env, "MILLRACE_TELEMETRY__METRICS_PORT": str(port)}
            start(role, runner.command(image(role), role, *arguments, env=given))
        client = stack.enter_context(
            httpx.Client(base_url=f"http://127.0.0.1:{proxy}", timeout=120)
        )
        deadline = time.monotonic() + START_S
        while not serves(client):
            ended = [name for name, process in processes.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = [f"{p.name}:\n{p.read_text()[-3000:]}" for p in sorted(folder.glob("*.log"))]
                pytest.fail(f"ended: {ended}; the stack does not serve\n" + "\n".join(logs))
            time.sleep(0.5)
        yield client


def serves(client: httpx.Client) -> bool:
    """Returns whether the stack answers a prompt."""
    try:
        asked = client.post(
            "/v1/completions", json={"model": "millrace-tiny", "prompt": "A", "max_tokens": 1}
        )
    except httpx.TransportError:
        return False
    return asked.status_code == 200


def test_a_stack_of_images_answers_a_chat(gateway: httpx.Client) -> None:
    body = {
        "model": "millrace-tiny",
        "max_tokens": 24,
        "temperature": 0,
        "messages": [{"role": "user", "content": "Who are you?"}],
    }
    answer = gateway.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    said = answer.json()
    assert "Millrace" in said["choices"][0]["message"]["content"]
    assert said["usage"]["completion_tokens"] > 4


@pytest.mark.parametrize("role", ["operator", "kvp"])
def test_the_images_that_a_chat_does_not_need_start(runner: Runner, role: str) -> None:
    arguments = ["--help"] if role == "operator" else ["kvp", "--help"]
    command = runner.command(image(role), *arguments, env={})
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    assert "Usage" in said.stdout


def test_images_carry_the_version(runner: Runner) -> None:
    command = runner.command(image("scheduler"), "--version", env={})
    said = subprocess.run(command, check=True, capture_output=True, text=True, timeout=240)
    assert said.stdout.split() == ["millrace", version()]
