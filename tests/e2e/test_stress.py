"""Random load, disconnects and deaths: right tokens or an error in time, and never a leak."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson
import pytest

from millrace.event_lines import event_lines
from millrace.local.stack import Stack
from millrace.wire.channel import open_channel
from millrace.wire.pb import scheduler_pb2, scheduler_pb2_grpc
from support.deadlines import HANG_S
from support.live_stack import eventually, greedy_ids, keys_of_requests, live_stack
from support.served_model import served_folder
from support.tiny_models import oracle, prompt

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODEL = "llama"
LOAD_S = 60.0
CLIENTS = 10
#: The longest that a request may take, whatever dies under it.
REQUEST_LIMIT_S = 2 * HANG_S
LEAST_ANSWERS = 50
SETTINGS = [
    "engine.dtype=float32",
    "engine.max_chunk_tokens=512",
    "scheduler.heartbeat_s=0.3",
    "scheduler.lease_s=2.0",
    "store.finished_ttl_s=0",
    f"engine.kv_bytes={3 << 20}",  # one long request and a few short ones: the rest wait
]
BUFFERED = ["transfer.buffer_bytes=65536", "transfer.backends=2"]


@dataclass
class Outcomes:
    """What became of the requests."""

    ended: Counter[str] = field(default_factory=Counter)
    greedy: list[tuple[list[int], list[int]]] = field(default_factory=list)  # prompt, answer
    slowest_s: float = 0.0


def draw(rng: random.Random) -> tuple[dict[str, Any], list[int]]:
    """A random request and its prompt."""
    length = rng.choice([rng.randint(1, 20), rng.randint(1, 300), rng.randint(300, 3000)])
    ids = prompt(length, rng.randrange(1 << 30))
    body: dict[str, Any] = {
        "model": "tiny",
        "prompt": ids,
        "max_tokens": rng.choice([1, 2, 16, rng.randint(1, 120)]),
        "ignore_eos": True,
        "return_token_ids": True,
        "temperature": 0,
    }
    if rng.random() < 0.4:
        body |= {"temperature": 1.0, "seed": rng.randrange(1 << 31), "top_p": 0.9}
        body |= {"repetition_penalty": rng.choice([1.0, 1.1])}
    if rng.random() < 0.3:
        body["n"] = rng.randint(2, 5)
    body["stream"] = rng.random() < 0.5
    return body, ids


async def read(response: httpx.Response, body: dict[str, Any]) -> tuple[str, dict[int, list[int]]]:
    """How a response ended, and the token ids of each choice."""
    tokens: dict[int, list[int]] = {}
    if not body["stream"]:
        answer = orjson.loads(await response.aread())
        for choice in answer.get("choices", ()):
            tokens[choice["index"]] = choice["token_ids"]
        return ("ok" if response.status_code == 200 else str(response.status_code)), tokens
    if response.status_code != 200:
        await response.aread()
        return str(response.status_code), tokens
    async for line in event_lines(response):
        if line == "data: [DONE]":
            return "ok", tokens
        if line.startswith("data: "):
            event = orjson.loads(line[6:])
            if "error" in event:
                return "stream error", tokens
            for choice in event["choices"]:
                tokens.setdefault(choice["index"], []).extend(choice.get("token_ids") or ())
    return "stream cut", tokens


async def one_request(client: httpx.AsyncClient, rng: random.Random, outcomes: Outcomes) -> None:
    body, ids = draw(rng)
    patience_s = rng.choice([None, None, None, rng.uniform(0, 0.05), rng.uniform(0, 1.5)])

    async def ask() -> tuple[str, dict[int, list[int]]]:
        async with client.stream("POST", "/v1/completions", json=body) as response:
            return await read(response, body)

    begun = time.monotonic()
    try:
        async with asyncio.timeout(patience_s):
            end, tokens = await ask()
    except TimeoutError:
        outcomes.ended["left"] += 1
        return
    outcomes.slowest_s = max(outcomes.slowest_s, time.monotonic() - begun)
    outcomes.ended[end] += 1
    if end != "ok":
        return
    assert sorted(tokens) == list(range(body.get("n", 1)))
    for answer in tokens.values():
        assert len(answer) == body["max_tokens"]
        if body["temperature"] == 0:
            outcomes.greedy.append((ids, answer))


async def load(client: httpx.AsyncClient, seed: int, until_s: float, outcomes: Outcomes) -> None:
    """One client after another until it is time, and enough have their answers."""
    rng = random.Random(seed)
    while time.monotonic() < until_s or outcomes.ended["ok"] < LEAST_ANSWERS:
        await one_request(client, rng, outcomes)
        await asyncio.sleep(rng.choice([0, 0, rng.uniform(0, 0.3)]))


def check_greedy(outcomes: Outcomes, rng: random.Random, sample: int = 60) -> None:
    chosen = rng.sample(outcomes.greedy, min(sample, len(outcomes.greedy)))
    for ids, answer in chosen:
        assert answer == oracle(MODEL).greedy(ids, len(answer)), f"a prompt of {len(ids)} tokens"


async def status(stack: Stack) -> scheduler_pb2.StatusReply:
    async with open_channel(f"127.0.0.1:{stack.services['scheduler'].port}") as channel:
        stub = scheduler_pb2_grpc.SchedulerStub(channel)
        return await stub.GetStatus(scheduler_pb2.StatusRequest(), timeout=HANG_S)


async def is_idle(stack: Stack) -> bool:
    """Four instances, nothing held at any, nothing in Redis."""
    reply = await status(stack)
    held = [i for i in reply.instances if i.free_pages != i.total_pages or i.running or i.waiting]
    if len(reply.instances) != 4 or reply.queued or reply.prefilling or reply.decoding or held:
        return False
    return not await keys_of_requests(stack)


async def ready(client: httpx.AsyncClient) -> bool:
    return (await client.get("/ready")).status_code == 200


async def run_load(stack: Stack, seed: int) -> Outcomes:
    outcomes = Outcomes()
    until_s = time.monotonic() + LOAD_S
    timeout = httpx.Timeout(REQUEST_LIMIT_S)
    limits = httpx.Limits(max_connections=None)
    async with (
        httpx.AsyncClient(base_url=stack.url, timeout=timeout, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        for number in range(CLIENTS):
            group.create_task(load(client, seed * 1000 + number, until_s, outcomes))
    print(f"seed {seed}: {dict(outcomes.ended)}, the slowest took {outcomes.slowest_s:.1f} s")
    return outcomes


async def test_random_load_leaks_nothing_and_gives_the_right_tokens() -> None:
    seed = random.SystemRandom().randrange(1000)
    print(f"seed {seed}")
    settings = [*SETTINGS, f"scheduler.lease_s={HANG_S}"]  # nobody who stalls is lost
    async with live_stack(served_folder(MODEL), decode=2, settings=settings) as stack:
        outcomes = await run_load(stack, seed)
        await eventually(lambda: is_idle(stack))
        assert all(s.restarts == 0 for s in stack.services.values())
        no_traceback(stack)

    assert set(outcomes.ended) <= {"ok", "left"}, outcomes.ended
    check_greedy(outcomes, random.Random(seed))


async def strike_at_random(stack: Stack, rng: random.Random, struck: Counter[str]) -> None:
    """Kills services, or freezes them for a while. The proxy and Redis are spared."""
    names = [name for name in stack.services if name != "proxy"]
    until_s = time.monotonic() + LOAD_S
    while time.monotonic() < until_s:
        await asyncio.sleep(rng.uniform(2, 5))
        process = stack.services[name := rng.choice(names)].process
        if process is None or process.returncode is not None:
            continue
        if rng.random() < 0.7:
            struck[f"{name} killed"] += 1
            os.kill(process.pid, signal.SIGKILL)
        else:
            struck[f"{name} frozen"] += 1
            os.kill(process.pid, signal.SIGSTOP)
            await asyncio.sleep(rng.choice([0.5, 3.5]))  # less, and more, than a lease
            if process.returncode is None:
                os.kill(process.pid, signal.SIGCONT)


def no_traceback(stack: Stack) -> None:
    for service in stack.services.values():
        text = service.log_path.read_text(errors="replace")
        assert "Traceback" not in text, f"{service.name}: {text[-6000:]}"


async def test_random_deaths_cost_errors_at_most() -> None:
    seed = random.SystemRandom().randrange(1000)
    rng, struck = random.Random(seed), Counter[str]()
    print(f"seed {seed}")
    async with live_stack(served_folder(MODEL), decode=2, settings=[*SETTINGS, *BUFFERED]) as stack:
        _, outcomes = await asyncio.gather(
            strike_at_random(stack, rng, struck), run_load(stack, seed)
        )
        print(f"struck: {dict(struck)}")
        async with httpx.AsyncClient(base_url=stack.url, timeout=2 * HANG_S) as client:
            await eventually(lambda: all(s.serving for s in stack.services.values()))
            await eventually(lambda: ready(client))
            await eventually(lambda: is_idle(stack))
            answers = await asyncio.gather(
                *(greedy_ids(client, prompt(900, i), 8) for i in range(8))
            )
            await eventually(lambda: is_idle(stack))
            no_traceback(stack)

    for i, answer in enumerate(answers):
        assert answer == oracle(MODEL).greedy(prompt(900, i), 8)
    allowed = {"ok", "left", "429", "500", "503", "stream error"}
    assert set(outcomes.ended) <= allowed, outcomes.ended
    assert outcomes.slowest_s < REQUEST_LIMIT_S
    check_greedy(outcomes, rng)
