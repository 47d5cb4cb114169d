"""A runner over a tiny model, and the plain loops that tests drive it with."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import torch

from millrace.core.kv.layout import KvLayout
from millrace.engine.forward.local_runner import ModelRunner
from millrace.engine.forward.mixed_pass import DecodeRows
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.forward.stage_passes import StagePasses
from millrace.engine.kv.pool import KvPool
from millrace.engine.kv.step_tables import page_table_of
from millrace.engine.model.loader import Model, load_model
from millrace.engine.runner import Runner
from millrace_kernels import determinism
from millrace_kernels.determinism import Alike


def layout_of(model: Model, num_pages: int, page_tokens: int = 16) -> KvLayout:
    """Returns the layout of a pool for a model, or for a rank's heads of it."""
    config, heads = model.config, model.kv_heads
    return KvLayout(
        model_hash=model.hash,
        dtype=str(model.dtype).removeprefix("torch."),
        num_layers=config.num_layers,
        num_kv_heads=heads.total,
        head_dim=config.head_dim,
        page_tokens=page_tokens,
        head_start=heads.start,
        head_count=heads.count,
        num_pages=num_pages,
    )


def make_pool(model: Model, *, page_tokens: int = 16, num_pages: int = 64) -> KvPool:
    return KvPool(layout_of(model, num_pages, page_tokens), model.device)


def make_runner(
    folder: Path,
    *,
    dtype: str = "float32",
    page_tokens: int = 16,
    num_pages: int = 64,
    alike: Alike = Alike.NOWHERE,
) -> ModelRunner:
    determinism.use(alike)
    model = load_model(folder, device="cpu", dtype=dtype)
    return ModelRunner(
        StagePasses(model, make_pool(model, page_tokens=page_tokens, num_pages=num_pages))
    )


class Request:
    """One request: its tokens, its pages and how far its KV goes."""

    def __init__(self, runner: ModelRunner, prompt: Sequence[int], room: int = 0) -> None:
        self.tokens = list(prompt)
        self.pages = runner.pool.allocate(runner.pool.layout.pages_for(len(prompt) + room))

    def task(self, start: int, stop: int, *, want_logits: bool = True) -> PrefillTask:
        return PrefillTask(
            token_ids=torch.tensor(self.tokens[start:stop]),
            history_tokens=start,
            pages=self.pages,
            want_logits=want_logits,
        )


def prefill(runner: ModelRunner, sequence: Request, cuts: Sequence[int] = ()) -> torch.Tensor:
    """Returns logits float32 [vocab] of the last position, chunk by chunk between `cuts`."""
    bounds = [0, *cuts, len(sequence.tokens)]
    task = None
    for start, stop in pairwise(bounds):
        task = sequence.task(start, stop, want_logits=stop == bounds[-1])
        for _ in runner.prefill_batch([task]):
            pass
    assert task is not None and task.logits is not None
    return task.logits


def decode(runner: ModelRunner, sequences: Sequence[Request]) -> torch.Tensor:
    """Runs one step: writes the KV of each sequence's last token; returns logits [b, vocab] after
    it.
    """
    lengths = [len(sequence.tokens) for sequence in sequences]
    width = max(len(sequence.pages) for sequence in sequences)
    table = [sequence.pages + [0] * (width - len(sequence.pages)) for sequence in sequences]
    return runner.decode(
        torch.tensor([sequence.tokens[-1] for sequence in sequences]),
        torch.tensor(lengths) - 1,
        torch.tensor(table, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
    )


def greedy(runner: ModelRunner, sequences: Sequence[Request], count: int) -> list[list[int]]:
    """Returns `count` tokens of every sequence, prefilled alone and decoded together."""
    prompts = [len(sequence.tokens) for sequence in sequences]
    for sequence in sequences:
        sequence.tokens.append(int(prefill(runner, sequence).argmax()))
    for _ in range(count - 1):
        for sequence, row in zip(sequences, decode(runner, sequences), strict=True):
            sequence.tokens.append(int(row.argmax()))
    return [s.tokens[n:] for s, n in zip(sequences, prompts, strict=True)]


def mixed(runner: Runner, decodes: Sequence[Request], tasks: Sequence[PrefillTask]) -> torch.Tensor:
    """Runs one pass of a step of `decodes` and of `tasks`; returns the decodes' logits
    [b, vocab].
    """
    lengths = torch.tensor([len(request.tokens) for request in decodes], dtype=torch.int64)
    rows = DecodeRows(
        token_ids=torch.tensor([r.tokens[-1] for r in decodes], dtype=torch.int64),
        positions=lengths - 1,
        kv_lens=lengths.int(),
    )
    table = page_table_of([*(r.pages for r in decodes), *(task.pages for task in tasks)])
    return runner.mixed(rows, table, tasks)


def in_company(
    runner: ModelRunner, requests: Sequence[Request], count: int, chance: random.Random
) -> list[list[torch.Tensor]]:
    """Adds `count` greedy tokens to every request; returns the logits [vocab] behind each token.

    Prompts come at random and are cut at random, beside any decodes.
    """
    ends = {request: len(request.tokens) + count for request in requests}
    logits: dict[Request, list[torch.Tensor]] = {request: [] for request in requests}
    done: Counter[Request] = Counter()
    waiting, running, coming = list[Request](), list[Request](), list(requests)

    def add(request: Request, row: torch.Tensor) -> None:
        logits[request].append(row.clone())
        request.tokens.append(int(row.argmax()))

    while coming or waiting or running:
        while coming and chance.random() < 0.5:
            waiting.append(coming.pop(0))
        chosen = [r for r in waiting if chance.random() < 0.6][:3]
        tasks = []
        for request in chosen:
            end = min(done[request] + chance.randint(1, 50), len(request.tokens))
            tasks.append(request.task(done[request], end, want_logits=end == len(request.tokens)))
            done[request] = end
        if not tasks and not running:
            continue
        found = mixed(runner, running, tasks) if tasks else decode(runner, running)
        for request, row in zip(running, found, strict=True):
            add(request, row)
        for request, task in zip(chosen, tasks, strict=True):
            if task.logits is not None:
                waiting.remove(request)
                running.append(request)
                add(request, task.logits)
        running = [request for request in running if len(request.tokens) < ends[request]]
    return [logits[request] for request in requests]
