"""Budgets of reasoning through the whole stack: exact, before a schema, and after a migration."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import orjson

from millrace.event_lines import event_lines
from millrace.shipped import SHIPPED_MODEL
from millrace.wire.clients.scheduler_client import evict
from support.deadlines import HANG_S
from support.live_stack import held, live_stack

FAST = ["engine.dtype=float32", "scheduler.heartbeat_s=0.2", "scheduler.lease_s=10"]
TEMPLATE = """{% for m in messages %}{{ m.role }}: {{ m.content }}
{% endfor %}{% if add_generation_prompt %}assistant: <think>{% endif %}"""
SCHEMA = {
    "type": "object",
    "properties": {
        "mill": {"enum": ["water", "wind"]},
        "wheels": {
            "type": "array",
            "items": {"enum": [1, 22, 333]},
            "minItems": 20,
            "maxItems": 20,
        },
    },
    "required": ["mill", "wheels"],
    "additionalProperties": False,
}
CHAT = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "Which mill?"}],
    "structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True},
    "max_tokens": 900,
    "temperature": 1.3,
    "return_token_ids": True,
}
BUDGET = 600


def reasoning_model(folder: Path) -> tuple[int, int]:
    """Writes the shipped model with tokens for the markers, in the place of its two rarest tokens.

    Returns the tokens of start and end.
    """
    shutil.copytree(SHIPPED_MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    vocabulary = tokenizer["model"]["vocab"]
    *kept, start, end = sorted(vocabulary.items(), key=lambda item: item[1])
    tokenizer["model"]["vocab"] = dict(kept)
    merges = [
        merge if isinstance(merge, list) else merge.split(" ")
        for merge in tokenizer["model"]["merges"]
    ]
    known = tokenizer["model"]["vocab"].keys()
    tokenizer["model"]["merges"] = [pair for pair in merges if "".join(pair) in known]
    for (_, token_id), text in ((start, "<think>"), (end, "</think>")):
        tokenizer["added_tokens"].append(
            {
                "id": token_id,
                "content": text,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
        )
    path.write_text(json.dumps(tokenizer))
    return start[1], end[1]


async def test_a_budget_holds_before_a_schema_and_after_a_move(tmp_path: Path) -> None:
    _, end = reasoning_model(tmp_path / "model")
    body = CHAT | {"max_reasoning_tokens": BUDGET, "logit_bias": {str(end): -100}}
    async with (
        live_stack(tmp_path / "model", prefill=1, decode=2, settings=FAST) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client,
    ):
        whole = await client.post("/v1/chat/completions", json=body | {"n": 3, "seed": 1})
        assert whole.status_code == 200, whole.text
        for choice in whole.json()["choices"]:
            check(choice["message"], choice["token_ids"], end)
        expected = [(await answer(client, body | {"seed": seed})) for seed in (3, 4)]
        for one in expected:
            check(one["message"], one["token_ids"], end)
        scheduler = f"127.0.0.1:{stack.services['scheduler'].port}"
        found: list[dict[str, Any]] = [
            {"seed": seed, "ids": [], "content": "", "reasoning": "", "moves": 0} for seed in (3, 4)
        ]
        reading = [asyncio.create_task(read_stream(client, body, one)) for one in found]
        async with held(stack, lambda: all(len(one["ids"]) > 10 for one in found)) as name:
            await evict(scheduler, name, abort=False)
        await asyncio.gather(*reading)
        assert [one["ids"] for one in found] == [one["token_ids"] for one in expected]
        for one, wanted in zip(found, expected, strict=True):
            assert one["content"] == wanted["message"]["content"]
            assert one["reasoning"] == wanted["message"]["reasoning"]
        assert sum(one["moves"] for one in found) > 0


def check(message: dict[str, Any], ids: list[int], end: int) -> None:
    """Checks that the marker comes after exactly BUDGET tokens, and that the answer is valid."""
    assert ids.index(end) == BUDGET
    assert ids.count(end) == 1
    assert message["reasoning"]
    jsonschema.validate(json.loads(message["content"]), SCHEMA)


async def answer(client: httpx.AsyncClient, body: dict[str, Any]) -> dict[str, Any]:
    response = await client.post("/v1/chat/completions", json=body)
    return response.json()["choices"][0]


async def read_stream(
    client: httpx.AsyncClient, body: dict[str, Any], found: dict[str, Any]
) -> None:
    body = body | {"stream": True, "seed": found["seed"]}
    headers = {"x-millrace-trace": "1"}
    async with client.stream(
        "POST", "/v1/chat/completions", json=body, headers=headers
    ) as response:
        async for line in event_lines(response):
            if not line.startswith("data: {"):
                continue
            chunk = orjson.loads(line[6:])
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                found["ids"] += choice.get("token_ids") or []
                for name in ("content", "reasoning"):
                    found[name] += choice["delta"].get(name) or ""
            spans = chunk.get("millrace", {}).get("spans", ())
            found["moves"] += sum(span["name"] == "moved" for span in spans)
