"""The memory of services does not grow with the requests that they have served."""

from __future__ import annotations

import asyncio
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from millrace.local.stack import Stack
from support.deadlines import HANG_S
from support.live_stack import live_stack
from support.served_model import served_folder

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

MODEL = "tiny"
CLIENTS = 12
#: Caches, pools and the allocator fill up in the first requests, and waver by some MB after them. A
#: request that stayed would take several KB.
WARM_UP, COUNTED = 9000, 12_000
MOST_BYTES_A_REQUEST = 1200
WORDS = ["river", "mill", "stone", "water", "wheel", "turns", "slow", "deep", "grain", "bread"]
SETTINGS = [
    f"engine.kv_bytes={64 << 20}",
    "store.finished_ttl_s=1",
    "telemetry.report_requests=1000",
    "telemetry.waterfall_bytes=1000000",
]

Body = dict[str, Any]
Ask = tuple[str, Body, str]  # path, body, and what its client does


def text(rng: random.Random, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def schema(rng: random.Random) -> Body:
    properties = {f"k{rng.randrange(1000)}": {"type": "integer"}}
    kept = {"type": "object", "properties": properties, "additionalProperties": False}
    return {"type": "json_schema", "json_schema": {"name": "a", "strict": True, "schema": kept}}


def chat(rng: random.Random, **more: Any) -> Ask:
    does = "stream" if more.get("stream") else "whole"
    messages = [{"role": "user", "content": text(rng, 40)}]
    return "/v1/chat/completions", {"messages": messages, "max_tokens": 12, **more}, does


def completion(rng: random.Random, **more: Any) -> Ask:
    body = {"prompt": text(rng, 30), "max_tokens": 6, **more}
    return "/v1/completions", body, "stream" if more.get("stream") else "whole"


KINDS: list[Callable[[random.Random], Ask]] = [
    chat,
    lambda rng: chat(rng, stream=True),
    lambda rng: (*chat(rng, stream=True)[:2], "resumable"),
    lambda rng: chat(rng, response_format=schema(rng), max_tokens=30),
    lambda rng: chat(rng, max_tokens=-1),
    completion,
    lambda rng: completion(rng, n=3, seed=rng.randrange(9)),
    lambda rng: completion(rng, logprobs=3, echo=True),
    lambda rng: completion(rng, prompt=text(rng, 1200), max_tokens=2),
    lambda rng: (*completion(rng, stream=True, max_tokens=400, ignore_eos=True)[:2], "leaves"),
    lambda rng: ("/v1/embeddings", {"input": [text(rng, 20), text(rng, 5)]}, "whole"),
    lambda rng: ("/v1/score", {"text_1": text(rng, 9), "text_2": text(rng, 9)}, "whole"),
    lambda rng: ("/v1/responses", {"input": text(rng, 9), "max_output_tokens": 6}, "deletes"),
    lambda rng: ("/tokenize", {"prompt": text(rng, 100)}, "whole"),
]


async def ask(client: httpx.AsyncClient, asked: Ask) -> int:
    """Returns the status of one request."""
    path, body, does = asked
    headers = {"x-millrace-resumable": "1"} if does == "resumable" else None
    async with client.stream("POST", path, json={"model": MODEL, **body}, headers=headers) as reply:
        if does == "leaves":
            await anext(reply.aiter_bytes())
            return reply.status_code
        await reply.aread()
    if does == "deletes":
        deleted = await client.delete(f"{path}/{reply.json()['id']}")
        assert deleted.status_code == 200, deleted.text
    return reply.status_code


async def serve(stack: Stack, rng: random.Random, requests: int) -> Counter[int]:
    """Asks for so many answers, of kinds in random order; returns their statuses."""
    found: Counter[int] = Counter()
    limits = httpx.Limits(max_connections=2 * CLIENTS)
    async with httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S, limits=limits) as client:

        async def go_on() -> None:
            while found.total() < requests:
                found[await ask(client, rng.choice(KINDS)(rng))] += 1

        await asyncio.gather(*(go_on() for _ in range(CLIENTS)))
    return found


def memory(stack: Stack) -> dict[str, int]:
    """Bytes of the services' own memory, by name; without files and shared memory."""
    found = {}
    for name, service in stack.services.items():
        assert service.process is not None
        status = Path(f"/proc/{service.process.pid}/status").read_text()
        (kib,) = re.findall(r"RssAnon:\s+(\d+) kB", status)
        found[name] = int(kib) * 1024
    return found


async def test_no_service_grows_with_the_requests_that_it_has_served() -> None:
    rng = random.Random(7)
    async with live_stack(served_folder("llama"), settings=SETTINGS) as stack:
        await serve(stack, rng, WARM_UP)
        before = memory(stack)
        statuses = await serve(stack, rng, COUNTED)
        after = memory(stack)
    assert set(statuses) == {200, 400}, statuses
    grown = {name: (after[name] - before[name]) / COUNTED for name in before}
    print({name: f"{bytes_each:.0f} bytes a request" for name, bytes_each in grown.items()})
    assert max(grown.values()) < MOST_BYTES_A_REQUEST, grown
