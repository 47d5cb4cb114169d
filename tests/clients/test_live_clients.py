"""Other people's clients as processes of their own, against a live stack with the shipped weights.

`make test-clients` installs them. `RECORD_CLIENTS=1` writes what they send to tests/data/clients,
which tests/proxy/test_recorded_clients.py posts in every `make test`.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
from collections.abc import AsyncIterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from clients.request_recorder import Recorder, recorder
from millrace.shipped import SHIPPED_MODEL
from support.deadlines import HANG_S
from support.live_stack import live_stack

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).parent
VENV = ROOT / ".venv-clients"
DATA = ROOT / "tests" / "data" / "clients"
MODEL = "tiny"
DEADLINE_S = 240  # importing litellm alone takes 10 s of a busy core

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        not (VENV / "bin" / "python").exists(),
        reason="other people's clients are not installed: make test-clients installs them",
    ),
]

PROGRAMS = (
    *("openai_sdk", "litellm_sdk", "langchain_sdk", "llama_index_sdk"),
    *("agents_sdk", "pydantic_ai_sdk", "instructor_sdk"),
)
PROVIDERS = ("openai", "openai-compatible")


#: A template with tools in Qwen's form: the shipped model's own has none.
TEMPLATE = """{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}{% for m in messages %}
{{ m.role }}: {{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}
{{- c.function.arguments | tojson }}</tool_call>{% endfor %}{% endfor %}
{%- if add_generation_prompt %}
assistant: {% endif %}"""
#: A tenant with one request at a time, for clients that try again.
TENANTS = f"""[tenants.limited]
key_sha256 = ["{sha256(b"sk-limited").hexdigest()}"]
concurrency = 1
slo_classes = ["default"]
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway_url(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    folder = tmp_path_factory.mktemp("clients")
    model = shutil.copytree(SHIPPED_MODEL, folder / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "settings.toml").write_text(TENANTS)
    async with live_stack(model, prefill=1, config=folder / "settings.toml") as stack:
        yield stack.url


@pytest_asyncio.fixture(loop_scope="module")
async def relay(gateway_url: str) -> AsyncIterator[Recorder]:
    async with recorder(gateway_url) as running:
        yield running


async def run(*command: str, **environment: str) -> str:
    """Runs a client to its end; returns what it printed."""
    offline = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "NO_PROXY": "*"}
    process = await asyncio.create_subprocess_exec(
        *command,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **offline, **environment},
    )
    try:
        out, err = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, (out + err).decode()[-4000:]
    return out.decode()


def record(name: str, relay: Recorder) -> None:
    """Keeps what the client sent, or checks that it is what was kept."""
    path = DATA / f"{name}.json"
    bodies: list[dict[str, Any]] = []
    for (route, body), status in zip(relay.posted, relay.statuses, strict=False):
        if route.startswith("/v1/"):
            bodies.append({"path": route, "status": status, "body": body})
    kept = {json.dumps(shape(b["body"])): b for b in bodies}  # one request of a kind
    if os.environ.get("RECORD_CLIENTS"):
        path.write_text(json.dumps(list(kept.values()), indent=1, ensure_ascii=False) + "\n")
    known = {json.dumps(shape(b["body"])) for b in json.loads(path.read_text())}
    assert set(kept) == known, f"{name} sends something else than {path.name} holds"


def shape(value: Any) -> Any:
    """The names of fields and the types of values: without what differs from run to run."""
    if isinstance(value, dict):
        return {name: shape(item) for name, item in sorted(value.items())}
    if isinstance(value, list):
        return [shape(value[0])] if value else []
    return type(value).__name__


async def expected(url: str) -> dict[str, Any]:
    """What the server says to the programs' conversation, over plain HTTP."""
    messages = [
        {"role": "system", "content": "Answer in one sentence."},
        {"role": "user", "content": "What turns the mill?"},
    ]
    body = {"model": MODEL, "messages": messages, "max_tokens": 12, "temperature": 0}
    async with httpx.AsyncClient(base_url=url, timeout=HANG_S, trust_env=False) as client:
        response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    return response.json()


def check(found: dict[str, Any], answer: dict[str, Any]) -> None:
    text = answer["choices"][0]["message"]["content"]
    tokens = answer["usage"]["completion_tokens"]
    assert text
    assert (found["chat"], found["stream"]) == (text, text)
    assert (found["usage"], found["stream_usage"]) == (tokens, tokens)
    tool, arguments = found["tool"]
    assert (tool, json.loads(arguments)["place"] in ("Oslo", "Rome")) == ("weather", True)
    if found["embeddings"] is not None:
        assert math.hypot(*found["embeddings"]) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("program", PROGRAMS)
async def test_python_client(gateway_url: str, relay: Recorder, program: str) -> None:
    printed = await run(
        str(VENV / "bin" / "python"),
        str(HERE / "programs" / f"{program}.py"),
        f"{relay.url}/v1",
        MODEL,
    )
    check(json.loads(printed.splitlines()[-1]), await expected(gateway_url))
    record(program, relay)


async def test_openai_client_at_every_endpoint(gateway_url: str) -> None:
    program = str(HERE / "programs" / "openai_endpoints.py")
    printed = await run(str(VENV / "bin" / "python"), program, f"{gateway_url}/v1", MODEL)
    assert "retries" in json.loads(printed.splitlines()[-1])["parts"]


@pytest.mark.parametrize("provider", PROVIDERS)
async def test_vercel_ai_sdk(gateway_url: str, relay: Recorder, provider: str) -> None:
    node, folder = shutil.which("node"), VENV / "node"
    if node is None or not (folder / "node_modules" / "ai").exists():
        pytest.skip("the Vercel AI SDK is not installed: it needs node and npm")
    program = shutil.copy(HERE / "programs" / "vercel.mjs", folder)  # node looks beside the program
    printed = await run(node, str(program), f"{relay.url}/v1", MODEL, provider)
    check(json.loads(printed.splitlines()[-1]), await expected(gateway_url))
    record(f"vercel_{provider.replace('-', '_')}", relay)


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/v1/completions"])
async def test_guidellm(relay: Recorder, tmp_path: Path, route: str) -> None:
    report = tmp_path / "report.json"
    await run(
        str(VENV / "bin" / "guidellm"),
        "run",
        "--backend",
        f"kind=openai_http,target={relay.url},model={MODEL},request_format={route}",
        "--profile",
        "kind=concurrent,streams=2",
        "--constraint",
        "kind=max_requests,count=6",
        "--tokenizer",
        f"kind=hf_auto,model={SHIPPED_MODEL}",
        "--data",
        "kind=synthetic_text,prompt_tokens=64,output_tokens=8",
        "--output",
        f"kind=json,path={report}",
        "--disable-console",
    )
    [benchmark] = json.loads(report.read_text())["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    # Of its last requests, one a stream, guidellm itself may cut some off when it ends.
    assert (totals["successful"] + totals["incomplete"], totals["errored"]) == (6, 0)
    assert totals["successful"] >= 4
    assert set(relay.statuses) == {200}
    record(f"guidellm_{'chat' if 'chat' in route else 'completions'}", relay)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_aiperf(relay: Recorder, tmp_path: Path, endpoint: str) -> None:
    await run(
        *(str(VENV / "bin" / "aiperf"), "profile", "--ui", "none", "--no-server-metrics"),
        *("--model", MODEL, "--url", relay.url, "--endpoint-type", endpoint, "--streaming"),
        *("--tokenizer", str(SHIPPED_MODEL), "--output-artifact-dir", str(tmp_path)),
        *("--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "8"),
        *("--extra-inputs", "ignore_eos:true", "--extra-inputs", "min_tokens:8"),
        *("--concurrency", "2", "--request-count", "6"),
        HF_HUB_OFFLINE="",  # else it looks for the folder among the hub's models
    )
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    assert (report["request_count"]["avg"], report["error_summary"]) == (6, [])
    assert report["total_usage_completion_tokens"]["avg"] == 6 * 8
    assert relay.statuses == [200] * 6
    record(f"aiperf_{endpoint}", relay)
