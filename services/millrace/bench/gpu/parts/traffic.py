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


ON_CUDA = Load(document_tokens=65_536, short_tokens=128, answer_tokens=16, rate=8.0, seconds=16.0)
ON_CPU = Load(document_tokens=2048, short_tokens=16, answer_tokens=4, rate=4.0, seconds=2.0)


def check(context: Context) -> None:
    """Measures both stacks, and claims that every request was answered."""
    load = ON_CUDA if context.is_cuda else ON_CPU
    shape = LLAMA_3_8B if context.is_cuda else FAMILIES["llama"]
    medians: dict[str, float] = {}
    with TemporaryDirectory() as name:
        folder = write_config(Path(name) / "model", shape)
        write_word_tokenizer(folder, shape["vocab_size"])
        for order, settings in _ORDERS.items():
            documents, short = asyncio.run(_serve(context, folder, load, settings))
            failed = {f"{one.error}: {one.detail}" for one in (*documents, *short) if one.error}
            is_whole = bool(documents and short) and not failed
            context.claim(f"{order}: all answered", is_whole, "; ".join(sorted(failed))[:500])
            first_s = [one.ttft_s for one in short if not one.error]
            if not first_s:
                continue
            medians[order] = float(np.median(first_s))
            what = f"{len(first_s)} prompts of {load.short_tokens} tokens, {order}"
            for share in (50, 99):
                value = 1e3 * float(np.percentile(first_s, share))
                context.figure(f"TTFT of {what}: p{share}", value, "ms")
            within = [one for one in documents if not one.error and one.ended_s <= load.seconds]
            rate = len(within) * load.document_tokens / load.seconds
            context.figure(f"documents of {load.document_tokens} beside, {order}", rate, "tokens/s")
    if len(medians) == len(_ORDERS):
        ratio = medians["fcfs"] / medians["millrace"]
        context.figure("TTFT of short prompts, fcfs beside millrace", ratio, "times as long")


async def _serve(
    context: Context, model: Path, load: Load, settings: Sequence[str]
) -> tuple[list[RequestRecord], list[RequestRecord]]:
    """Returns the records of the documents and of the short prompts."""
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
    async with Stack(options) as stack, asyncio.TaskGroup() as clients:
        documents = clients.create_task(_send(stack.url, load, load.document_tokens, None))
        short = clients.create_task(_send(stack.url, load, load.short_tokens, load.rate))
    return documents.result(), short.result()


async def _send(url: str, load: Load, tokens: int, rate_rps: float | None) -> list[RequestRecord]:
    """Sends prompts of so many tokens at this rate; None: the next when one is answered."""
    workload = WorkloadOptions(
        rate_rps=rate_rps,
        open_arrivals=rate_rps is None,
        input_tokens=lambda rng: tokens,
        output_tokens=lambda rng: load.answer_tokens,
        duration_s=load.seconds,
    )
    options = ServeOptions(
        url=url,
        workload=workload,
        concurrency=1 if rate_rps is None else None,
        token_ids=_TOKEN_IDS,
        timeout_s=_ANSWER_S,
    )
    return await run(options)
