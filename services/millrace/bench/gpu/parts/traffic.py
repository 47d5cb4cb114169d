"""Part *traffic*: short prompts beside long documents, through a whole stack on the one device.

A prefill and a decode instance share the device. One client sends documents, the next when one is
answered; others send short prompts at random moments. The same requests go to a stack that serves
in the order of arrival without preemption, and to one with the default settings.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import httpx
import numpy as np

from millrace.bench.gpu.part import Context
from millrace.bench.gpu.shapes import FAMILIES, LLAMA_3_8B, write_config
from millrace.local.options import StackOptions
from millrace.local.stack import Stack

_MODEL: Final = "shape"
_TOKENIZER: Final = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_START_S: Final = 90.0
_ANSWER_S: Final = 60.0
_ORDERS: Final[Mapping[str, Sequence[str]]] = {
    "fcfs": ("scheduler.policy=fcfs", "scheduler.preemption=none"),
    "millrace": (),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """The requests. `rate`: short prompts a second, for `seconds`."""

    document_tokens: int
    short_tokens: int
    answer_tokens: int
    rate: float
    seconds: float


ON_CUDA = Load(document_tokens=65_536, short_tokens=128, answer_tokens=16, rate=8.0, seconds=16.0)
ON_CPU = Load(document_tokens=2048, short_tokens=16, answer_tokens=4, rate=4.0, seconds=2.0)


@dataclass(slots=True)
class Seen:
    """What the clients saw: seconds to the first tokens of short prompts, and documents' tokens."""

    first_s: list[float] = field(default_factory=list)
    documents: int = 0
    failed: list[str] = field(default_factory=list)


def check(context: Context) -> None:
    """Measures both stacks, and claims that every request was answered."""
    load = ON_CUDA if context.is_cuda else ON_CPU
    medians: dict[str, float] = {}
    with TemporaryDirectory() as name:
        folder = _model(context, Path(name))
        for order, settings in _ORDERS.items():
            seen = asyncio.run(_serve(context, folder, load, settings))
            context.claim(
                f"{order}: all answered",
                not seen.failed and bool(seen.first_s) and bool(seen.documents),
                "; ".join(sorted(set(seen.failed)))[:500],
            )
            if not seen.first_s:
                continue
            medians[order] = float(np.median(seen.first_s))
            what = f"{len(seen.first_s)} prompts of {load.short_tokens} tokens, {order}"
            for share in (50, 99):
                value = 1e3 * float(np.percentile(seen.first_s, share))
                context.figure(f"TTFT of {what}: p{share}", value, "ms")
            rate = seen.documents * load.document_tokens / load.seconds
            context.figure(f"documents of {load.document_tokens} beside, {order}", rate, "tokens/s")
    if len(medians) == len(_ORDERS):
        ratio = medians["fcfs"] / medians["millrace"]
        context.figure("TTFT of short prompts, fcfs beside millrace", ratio, "times as long")


def _model(context: Context, folder: Path) -> Path:
    """Makes a model of random weights, with the toy model's tokenizer."""
    toy = context.source / "models" / "millrace-tiny"
    vocabulary = json.loads((toy / "config.json").read_text())["vocab_size"]
    shape = LLAMA_3_8B if context.is_cuda else FAMILIES["llama"]
    made = write_config(folder / _MODEL, {**shape, "vocab_size": vocabulary})
    for name in _TOKENIZER:
        shutil.copy(toy / name, made / name)
    return made


async def _serve(context: Context, model: Path, load: Load, settings: Sequence[str]) -> Seen:
    options = StackOptions(
        model=str(model),
        port=0,
        prefill=1,
        decode=1,
        settings=[
            f"engine.device={context.device}",
            "engine.dtype=bfloat16",
            "engine.load_format=dummy",
            "engine.profile=none",
            *settings,
        ],
        start_timeout_s=_START_S,
        devices=["0"] if context.is_cuda else [],
        share_devices=True,
    )
    limits = httpx.Limits(max_connections=None)
    async with (
        Stack(options) as stack,
        httpx.AsyncClient(base_url=stack.url, timeout=_ANSWER_S, limits=limits) as client,
    ):
        return await _clients(client, load)


async def _clients(client: httpx.AsyncClient, load: Load) -> Seen:
    seen, drawn = Seen(), random.Random(0)
    await _ask(client, drawn, load.short_tokens, load)  # pays one-time costs
    until_s = time.perf_counter() + load.seconds

    async def documents() -> None:
        while time.perf_counter() < until_s:
            await _noted(seen, _ask(client, drawn, load.document_tokens, load))
            seen.documents += time.perf_counter() < until_s

    async def short() -> None:
        first_s = await _noted(seen, _ask(client, drawn, load.short_tokens, load))
        if first_s is not None:
            seen.first_s.append(first_s)

    async with asyncio.TaskGroup() as clients:
        clients.create_task(documents())
        while time.perf_counter() < until_s:
            await asyncio.sleep(drawn.expovariate(load.rate))
            clients.create_task(short())
    return seen


async def _noted(seen: Seen, asking: Awaitable[float]) -> float | None:
    """Returns what is awaited; None, with a note, if the request failed."""
    try:
        return await asking
    except (httpx.HTTPError, ValueError) as error:
        seen.failed.append(f"{type(error).__name__}: {error}")
        return None


async def _ask(client: httpx.AsyncClient, drawn: random.Random, tokens: int, load: Load) -> float:
    """Sends a prompt of so many tokens, none shared. Returns the seconds to the first event."""
    body = {
        "model": _MODEL,
        "prompt": [drawn.randrange(100, 1000) for _ in range(tokens)],
        "max_tokens": load.answer_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    begun_s, first_s = time.perf_counter(), 0.0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        if answer.is_error:
            raise ValueError((await answer.aread()).decode()[:200])
        async for chunk in answer.aiter_text():
            if not first_s and "data:" in chunk:
                first_s = time.perf_counter() - begun_s
            if '"error"' in chunk:
                raise ValueError(chunk[:200])
    return first_s
