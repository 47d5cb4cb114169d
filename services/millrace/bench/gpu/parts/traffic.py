"""Part *traffic*: short prompts beside long documents, through a whole stack on the one device.

A prefill and a decode instance share the device. One client sends documents, the next when one is
answered; others send short prompts at random moments. The same requests go to a stack that serves
in the order of arrival without preemption, and to one with the default settings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import numpy as np

from millrace.bench.common.load_test import ServeOptions, run
from millrace.bench.common.random_model import write_word_tokenizer
from millrace.bench.common.report import RequestRecord
from millrace.bench.gpu.part import Context
from millrace.bench.gpu.shapes import FAMILIES, LLAMA_3_8B, write_config
from millrace.local.options import StackOptions
from millrace.local.stack import Stack
from millrace.sim.workload.workload import WorkloadOptions

_TOKEN_IDS: Final = (100, 500)  # of prompts
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
    alone_s: float  # in which short prompts are sent one by one, before all others


ON_CUDA = Load(
    document_tokens=65_536,
    short_tokens=128,
    answer_tokens=16,
    rate=8.0,
    seconds=12.0,
    alone_s=1.5,
)
ON_CPU = Load(
    document_tokens=2048, short_tokens=16, answer_tokens=4, rate=4.0, seconds=2.0, alone_s=0.5
)


@dataclass(frozen=True, slots=True)
class Served:
    """The records of short prompts one by one, then of documents, and of short prompts beside."""

    alone: list[RequestRecord]
    documents: list[RequestRecord]
    short: list[RequestRecord]


def check(context: Context) -> None:
    """Measures both stacks, and claims that every request was answered."""
    load = ON_CUDA if context.is_cuda else ON_CPU
    shape = LLAMA_3_8B if context.is_cuda else FAMILIES["llama"]
    medians: dict[str, float] = {}
    with TemporaryDirectory() as name:
        folder = write_config(Path(name) / "model", shape)
        write_word_tokenizer(folder, shape["vocab_size"])
        for order, settings in _ORDERS.items():
            served = asyncio.run(_serve(context, folder, load, settings))
            every = (*served.alone, *served.documents, *served.short)
            failed = {f"{one.error}: {one.detail}" for one in every if one.error}
            is_whole = bool(served.documents and served.short) and not failed
            context.claim(f"{order}: all answered", is_whole, "; ".join(sorted(failed))[:500])
            if is_whole:
                medians[order] = _report(context, load, order, served)
    if len(medians) == len(_ORDERS):
        ratio = medians["fcfs"] / medians["millrace"]
        context.figure("TTFT of short prompts, fcfs beside millrace", ratio, "times as long")


def _report(context: Context, load: Load, order: str, served: Served) -> float:
    """Notes the figures of one stack. Returns the median TTFT of short prompts beside documents."""
    what = f"a prompt of {load.short_tokens} tokens"
    if served.alone:
        alone_s = float(np.median([one.ttft_s for one in served.alone]))
        context.figure(f"TTFT of {what}, alone, {order}", 1e3 * alone_s, "ms")
    first_s = [one.ttft_s for one in served.short]
    for share in (50, 99):
        value = 1e3 * float(np.percentile(first_s, share))
        name = f"TTFT of {what}, of {len(first_s)} beside documents, {order}: p{share}"
        context.figure(name, value, "ms")
    documents = served.documents
    rate = len(documents) * load.document_tokens / max(one.ended_s for one in documents)
    name = f"documents of {load.document_tokens} tokens, {len(documents)} beside, {order}"
    context.figure(name, rate, "tokens/s")
    return float(np.median(first_s))


async def _serve(context: Context, model: Path, load: Load, settings: Sequence[str]) -> Served:
    """Serves the load by a new stack."""
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
    async with Stack(options) as stack:
        alone = await _send(stack.url, load, load.short_tokens, None, load.alone_s, warmup=2)
        async with asyncio.TaskGroup() as clients:
            sent = [
                clients.create_task(_send(stack.url, load, tokens, rate, load.seconds))
                for tokens, rate in ((load.document_tokens, None), (load.short_tokens, load.rate))
            ]
    documents, short = (one.result() for one in sent)
    return Served(alone, documents, short)


async def _send(
    url: str, load: Load, tokens: int, rate_rps: float | None, seconds: float, warmup: int = 0
) -> list[RequestRecord]:
    """Sends prompts of so many tokens at this rate; None: the next when one is answered."""
    workload = WorkloadOptions(
        rate_rps=rate_rps,
        open_arrivals=rate_rps is None,
        input_tokens=lambda rng: tokens,
        output_tokens=lambda rng: load.answer_tokens,
        duration_s=seconds,
    )
    options = ServeOptions(
        url=url,
        workload=workload,
        concurrency=1 if rate_rps is None else None,
        token_ids=_TOKEN_IDS,
        timeout_s=_ANSWER_S,
        warmup=warmup,
    )
    return await run(options)
