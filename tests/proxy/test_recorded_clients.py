"""Recorded requests of other clients, posted to the proxy: the same status, a whole answer.

The bodies come from the clients themselves, with long texts and lists of tools cut. Those of
vllm_bench and lm_eval were written down from their sources.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import pytest_asyncio

from support.gateway import MODEL, Script
from support.tool_model import serving

DATA = Path(__file__).resolve().parents[1] / "data" / "clients"
FILES = sorted(DATA.glob("*.json"))

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory):
    async with serving(tmp_path_factory.mktemp("model")) as running:
        yield running


async def test_every_client_is_there():
    names = {path.stem for path in FILES}
    assert {"guidellm_chat", "litellm_sdk", "langchain_sdk", "llama_index_sdk"} <= names
    assert {"vercel_openai", "vercel_openai_compatible", "vllm_bench", "aiperf_chat"} <= names
    assert {"codex", "haystack", "inspect_ai", "semantic_kernel", "strands"} <= names


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
async def test_requests_of_a_client(stack, path):
    requests = json.loads(path.read_text())
    assert requests
    for request in requests:
        body = {**request["body"], "model": MODEL}
        calls = body.get("tool_choice") not in (None, "auto", "none")
        stack.fleet.script = Script(reply=call_of(body) if calls else "Hello there")
        response = await stack.http.post(request["path"], json=body)
        assert response.status_code == request["status"] == 200, response.text
        if request["path"] == "/v1/embeddings":
            texts = body["input"]
            assert len(response.json()["data"]) == (1 if isinstance(texts, str) else len(texts))
        elif request["path"] == "/v1/responses":
            check_response(response.text, streams=body.get("stream", False), calls=calls)
        elif body.get("stream"):
            check_stream(response.text, body.get("stream_options") or {})
        else:
            reasons = {choice["finish_reason"] for choice in response.json()["choices"]}
            assert reasons <= ({"tool_calls"} if calls else {"stop", "length"})


def call_of(body: dict) -> str:
    """Returns what a model writes when it must call a function of the request."""
    tool = body["tools"][0]
    name = tool.get("function", tool)["name"]
    return json.dumps([{"name": name, "arguments": {"place": "Oslo"}}])


def check_response(text: str, *, streams: bool, calls: bool) -> None:
    if streams:
        events = [json.loads(line[6:]) for line in text.split("\n") if line.startswith("data: ")]
        assert events[-1]["type"] in ("response.completed", "response.incomplete")
        document = events[-1]["response"]
    else:
        document = json.loads(text)
    assert document["status"] in ("completed", "incomplete")
    assert {item["type"] for item in document["output"]} == {
        "function_call" if calls else "message"
    }


def check_stream(text: str, options: dict) -> None:
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    if options.get("include_usage"):
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] > 0
    if options.get("continuous_usage_stats"):
        assert all(chunk["usage"] for chunk in chunks)
