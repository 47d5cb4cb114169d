"""A whole stack of real processes for one test module."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import redis.asyncio

from millrace.instance.tasks import stacks
from millrace.local.forks import ForkedProcess
from millrace.local.options import StackOptions
from millrace.local.stack import Stack
from support.deadlines import HANG_S

POOL_BYTES = 64 << 20
#: `check_sampling` needs it: the models' templates do not say how they mark reasoning.
REASONS = "proxy.reasoning_parser=think"
MOST_LOG_LINES = 60
#: A service that is held runs and stops for this long in turns: some steps of the smallest models.
SLICE_S = 0.02


@asynccontextmanager
async def live_stack(
    model: Path | str,
    *,
    prefill: int = 2,
    decode: int = 1,
    kvp: int = 0,
    schedulers: int = 1,
    settings: Sequence[str] = (),
    role_settings: Mapping[str, Sequence[str]] | None = None,
    config: Path | None = None,
) -> AsyncIterator[Stack]:
    """Starts the stack on free ports. Stopping raises when any process ended with an error. When a
    test fails, the ends of all logs are printed.
    """
    options = StackOptions(
        model=str(model),
        model_name="tiny",
        prefill=prefill,
        decode=decode,
        kvp=kvp,
        schedulers=schedulers,
        port=0,
        threads=1,
        start_timeout_s=2 * HANG_S,
        settings=[f"engine.kv_bytes={POOL_BYTES}", REASONS, *settings],
        role_settings=role_settings or {},
        config=config,
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


async def eventually(check: Any, timeout_s: float = HANG_S, *, what: str = "") -> None:
    """Waits until `check()` (plain or async) is true; fails after a while with its last value and
    with what all tasks and threads of this process wait for.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while True:
        value = check()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return
        if loop.time() >= deadline_s:
            print(stacks())
            raise AssertionError(f"{what or 'it'}: still {value!r} after {timeout_s:g} s")
        await asyncio.sleep(0.01)


@asynccontextmanager
async def held(stack: Stack, name: str, check: Callable[[], bool]) -> AsyncIterator[ForkedProcess]:
    """Lets a service run in short slices until `check()` is true; inside, it is stopped.

    What the service does is then in the state that `check` wants, however busy the machine is.
    """
    process = stack.services[name].process
    assert process is not None

    async def has_run_enough() -> bool:
        process.send_signal(signal.SIGCONT)
        await asyncio.sleep(SLICE_S)
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(SLICE_S)  # others do what it caused
        return check()

    try:
        await eventually(has_run_enough)
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGCONT)


async def keys_of_requests(stack: Stack) -> list[bytes]:
    """What the store holds beside the schedulers' leases, which are there as long as they are."""
    url = next(a for a in stack.services["proxy"].arguments if a.startswith("store.url="))
    async with redis.asyncio.from_url(url.removeprefix("store.url=")) as client:
        return [key for key in await client.keys("*") if b":lease:" not in key]
