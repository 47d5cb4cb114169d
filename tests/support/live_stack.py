"""A whole stack of real processes for one test module."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import redis.asyncio

from millrace.core.config import StoreConfig
from millrace.local.options import StackOptions
from millrace.local.processes.service import Service
from millrace.local.stack import Stack
from millrace.state.leader import lease_name
from millrace.state.leases import Lease
from millrace.state.open import open_leases
from millrace.wire.clients.scheduler_client import get_instances
from support.deadlines import HANG_S, eventually

POOL_BYTES = 64 << 20
#: `check_sampling` needs it: the models' templates do not say how they mark reasoning.
REASONS = "proxy.reasoning_parser=think"
MOST_LOG_LINES = 60
#: Runs apart from the tests' loop: it lets processes run for 10 ms in 100, until it is killed.
SLOWS = """
import os, signal, sys, time
while True:
    for number, pause_s in ((signal.SIGCONT, 0.01), (signal.SIGSTOP, 0.09)):
        for pid in sys.argv[1:]:
            os.kill(int(pid), number)
        time.sleep(pause_s)
"""


@asynccontextmanager
async def live_stack(
    model: Path | str,
    *,
    more: Sequence[tuple[str, str]] = (),
    prefill: int = 2,
    decode: int = 1,
    kvp: int = 0,
    schedulers: int = 1,
    redis_url: str = "",
    settings: Sequence[str] = (),
    role_settings: Mapping[str, Sequence[str]] | None = None,
    config: Path | None = None,
    record: Path | None = None,
) -> AsyncIterator[Stack]:
    """Starts the stack on free ports; `more` are further models with their names. Stopping raises
    when any process ended with an error. When a test fails, the ends of all logs are printed.
    """
    options = StackOptions(
        model=str(model),
        model_name="tiny",
        more=more,
        prefill=prefill,
        decode=decode,
        kvp=kvp,
        schedulers=schedulers,
        redis=redis_url,
        port=0,
        threads=1,
        start_timeout_s=2 * HANG_S,
        settings=[f"engine.kv_bytes={POOL_BYTES}", REASONS, *settings],
        role_settings=role_settings or {},
        config=config,
        record=record,
    )
    async with Stack(options) as stack:
        try:
            yield stack
        except BaseException:
            print_logs(stack)
            raise


def print_logs(stack: Stack) -> None:
    """Prints the last lines of every service's log."""
    for name, service in stack.services.items():
        lines = service.log_path.read_text(errors="replace").splitlines()
        print(f"== {name}", *lines[-MOST_LOG_LINES:], sep="\n")


async def complete(client: httpx.AsyncClient, **body: Any) -> dict[str, Any]:
    """One completion that must succeed; returns the response's JSON."""
    response = await client.post("/v1/completions", json={"model": "tiny", **body})
    assert response.status_code == 200, response.text
    return response.json()


async def greedy_ids(
    client: httpx.AsyncClient, prompt: list[int], max_tokens: int = 64
) -> list[int]:
    """The greedy continuation of a prompt, as token ids."""
    answer = await complete(
        client,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
    )
    return answer["choices"][0]["token_ids"]


async def check_constrained(client: httpx.AsyncClient, prompt: list[int]) -> None:
    """Asks for lines of letters, which a random model never writes by itself."""
    lines = "([a-z]{1,9}\n){4}"
    answer = await complete(client, prompt=prompt, guided_regex=lines, max_tokens=60, seed=3)
    (choice,) = answer["choices"]
    assert choice["finish_reason"] == "stop" and re.fullmatch(lines, choice["text"]), choice


async def check_sampling(client: httpx.AsyncClient, prompt: list[int]) -> None:
    """Checks a grammar, a budget of reasoning, and barred tokens in the layout at hand."""
    await check_constrained(client, prompt)
    start, end = [await token_ids(client, text) for text in ("<think>", "</think>")]
    few = [*start, *end, *range(300, 320)]
    answer = await complete(
        client,
        prompt=[*prompt, *start],
        max_reasoning_tokens=7,
        allowed_token_ids=few,
        bad_words=["</think>", "<"],
        max_tokens=24,
        ignore_eos=True,
        return_token_ids=True,
        temperature=1.5,
        seed=5,
    )
    ids = answer["choices"][0]["token_ids"]
    assert ids[7 : 7 + len(end)] == end, ids
    others = ids[:7] + ids[7 + len(end) :]
    assert set(others) <= set(few) - {end[0]}, ids


async def token_ids(client: httpx.AsyncClient, text: str) -> list[int]:
    """Returns the tokens of a text, without special tokens around it."""
    body = {"prompt": text, "add_special_tokens": False}
    return (await client.post("/tokenize", json=body)).json()["tokens"]


@asynccontextmanager
async def slowed(pids: Sequence[int]) -> AsyncIterator[None]:
    """Processes get a tenth of their time inside the block, and are stopped at its end."""

    def stop() -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGSTOP)

    stop()  # until the slowing has begun
    slows = await asyncio.create_subprocess_exec(
        sys.executable, "-S", "-c", SLOWS, *map(str, pids), stderr=asyncio.subprocess.DEVNULL
    )
    try:
        yield
    finally:
        with suppress(ProcessLookupError):  # it ends by itself when one of them has
            slows.kill()
        stop()
        await slows.wait()
        stop()  # again: its last signal may have come after


@asynccontextmanager
async def going_on(stack: Stack, role: str) -> AsyncIterator[list[int]]:
    """The process ids of a role's instances, which go on at the end of the block."""
    processes = [stack.services[name].process for name in stack.instances(role)]
    there = [process for process in processes if process is not None]
    try:
        yield [process.pid for process in there]
    finally:
        for process in there:
            process.send_signal(signal.SIGCONT)


@asynccontextmanager
async def held(stack: Stack, check: Callable[[], Any]) -> AsyncIterator[str]:
    """Slows the decode instances until `check()` is true; inside, they are stopped.

    What they do is then in the state that `check` wants, however busy the machine is: they have
    done little more when this process, or one between, stalls for a second.
    Yields the name of the one that holds the most requests.
    """
    async with going_on(stack, "decode") as pids:
        async with slowed(pids):
            await eventually(check)
        yield await busiest(stack, "decode")


async def busiest(stack: Stack, role: str) -> str:
    """The instance of a role that holds the most requests, by the scheduler's view."""
    found = [one for one in await get_instances(stack.scheduler_address) if one.role == role]
    return max(found, key=lambda one: one.held_requests).id


async def keys_of_requests(stack: Stack) -> list[bytes]:
    """What the store holds beside the schedulers' leases and reports, which stay."""
    async with redis.asyncio.from_url(store_url(stack)) as client:
        return [
            key
            for key in await client.keys("*")
            if b":lease:" not in key and b":scheduler:" not in key
        ]


def store_url(stack: Stack) -> str:
    """The URL of the store that the stack's services use."""
    (url,) = (a for a in stack.services["proxy"].arguments if a.startswith("store.url="))
    return url.removeprefix("store.url=")


async def lease_of(stack: Stack) -> Lease:
    """The lease of the scheduler that leads. A store that has lost its data waits for one."""
    leases = open_leases(StoreConfig(url=store_url(stack)))
    found: Lease | None = None

    async def is_there() -> bool:
        nonlocal found
        found = await leases.read(lease_name(stack.group_of(0)))
        return found is not None

    try:
        await eventually(is_there, what="nobody leads")
    finally:
        await leases.close()
    assert found is not None
    return found


async def leader_of(stack: Stack) -> Service:
    """The scheduler that leads."""
    address = (await lease_of(stack)).address
    schedulers = [one for name, one in stack.services.items() if name.startswith("scheduler")]
    (found,) = (
        one for one in schedulers if address in one.arguments or address.endswith(f":{one.port}")
    )
    return found
