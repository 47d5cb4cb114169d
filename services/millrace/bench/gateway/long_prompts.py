"""Measures what prompts of a million tokens cost the other streams of a proxy, and its memory."""

from __future__ import annotations

import asyncio
import http.client
import multiprocessing
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from multiprocessing.connection import Connection
from statistics import median

import orjson
import psutil

from millrace.bench.common.sse_client import Response, SseClient
from millrace.bench.gateway.proxy_process import TEXT, Engine
from millrace.core.errors import MillraceError

PATH = "/v1/chat/completions"
STEP_S = 0.025
_LOOK_S = 0.02
_REST_S = 2.0
_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Gaps:
    """Times between two tokens of a stream, over all streams, in milliseconds."""

    p50_ms: float
    p99_ms: float
    max_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LongPromptCost:
    """Paced streams alone, and beside long prompts that come one after the other.

    The proxy has seen nothing of a prompt; then it gets the chat's next turn. `answer_s` and
    `next_answer_s` are the medians of both. Memory is the proxy's resident memory in MiB: before
    the first prompt, at most, and 2 s after the last one.
    """

    prompt_tokens: int
    body_mib: float
    prompts: int
    answer_s: float
    next_answer_s: float
    streams: int
    alone: Gaps
    beside: Gaps
    before_mib: float
    peak_mib: float
    after_mib: float


async def measure(
    engine: Engine, pid: int, port: int, *, prompt_tokens: int, streams: int, steps: int
) -> LongPromptCost:
    """Measures two runs of `steps` steps of 25 ms. Raises MillraceError for a wrong answer."""
    client = SseClient(f"http://127.0.0.1:{port}")
    prompt = _prompt(engine, prompt_tokens)
    try:
        await _run_streams(engine, client, streams, steps // 4)  # warms up
        alone = await _run_streams(engine, client, streams, steps)
        async with _watched(pid) as memory, _sender(port, prompt) as answers:
            beside = await _run_streams(engine, client, streams, steps)
    finally:
        client.close()
    return LongPromptCost(
        prompt_tokens=prompt_tokens,
        body_mib=len(_body(prompt, 0, turns=1)) / _MIB,
        prompts=len(answers),
        answer_s=median(answers[::2]),
        next_answer_s=median(answers[1::2]),
        streams=streams,
        alone=alone,
        beside=beside,
        before_mib=memory[0],
        peak_mib=max(memory),
        after_mib=memory[-1],
    )


def _prompt(engine: Engine, prompt_tokens: int) -> str:
    """Returns a text of about this length."""
    per_text = len(engine.token_ids)
    return TEXT * (prompt_tokens // per_text) + TEXT[: prompt_tokens % per_text]


def _body(prompt: str, number: int, *, turns: int) -> bytes:
    """Returns a request for one token. Chats of different numbers share no work in the proxy."""
    messages = [{"role": "user", "content": prompt}]
    for _ in range(turns - 1):
        messages += [{"role": "assistant", "content": TEXT}, {"role": "user", "content": TEXT}]
    salt = str(number)
    return orjson.dumps(
        {"model": "stub", "messages": messages, "max_tokens": 1, "cache_salt": salt}
    )


async def _run_streams(engine: Engine, client: SseClient, count: int, steps: int) -> Gaps:
    message = {"role": "user", "content": TEXT}
    body = orjson.dumps(
        {"model": "stub", "messages": [message], "max_tokens": steps, "stream": True}
    )
    async with asyncio.TaskGroup() as group:
        posts = [group.create_task(client.post(PATH, body)) for _ in range(count)]
        await engine.run_streams(await engine.arrived(count), steps, STEP_S)
    return _gaps([post.result() for post in posts])


def _gaps(answers: Sequence[Response]) -> Gaps:
    found = sorted(
        (later_s - earlier_s) * 1e3
        for answer in answers
        for (earlier_s, _), (later_s, _) in pairwise(answer.events[1:-2])  # the tokens
    )
    return Gaps(
        p50_ms=found[len(found) // 2], p99_ms=found[len(found) * 99 // 100], max_ms=found[-1]
    )


@asynccontextmanager
async def _watched(pid: int) -> AsyncIterator[list[float]]:
    """Yields the list to which the process's resident memory is written, MiB."""
    process = psutil.Process(pid)
    found = [process.memory_info().rss / _MIB]

    async def look() -> None:
        while True:
            found.append(process.memory_info().rss / _MIB)
            await asyncio.sleep(_LOOK_S)

    looking = asyncio.create_task(look())
    try:
        yield found
        await asyncio.sleep(_REST_S)
    finally:
        looking.cancel()
    found.append(process.memory_info().rss / _MIB)


@asynccontextmanager
async def _sender(port: int, prompt: str) -> AsyncIterator[list[float]]:
    """Sends chats of two turns, one after the other, from a process of its own, so that this one
    is not busy.

    Yields the list that has the answers' times, in seconds, at the end: first and next turns in
    alternation.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_send, args=(port, prompt, theirs), daemon=True)
    process.start()
    theirs.close()
    answers: list[float] = []
    try:
        await asyncio.to_thread(ours.recv)  # it has started
        yield answers
        ours.send("stop")
        answers += await asyncio.to_thread(ours.recv)
    except EOFError as error:
        raise MillraceError("a long prompt was not answered") from error
    finally:
        process.terminate()
        await asyncio.to_thread(process.join)


def _send(port: int, prompt: str, pipe: Connection) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port)
    answers: list[float] = []
    pipe.send("ready")
    for number in count():
        for turns in (1, 2):
            body = _body(prompt, number, turns=turns)
            began_s = time.perf_counter()
            connection.request("POST", PATH, body, {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            if answer.status != 200:
                raise MillraceError(f"status {answer.status}: {text[:500]!r}")
            answers.append(time.perf_counter() - began_s)
        if pipe.poll():
            break
    pipe.send(answers)
