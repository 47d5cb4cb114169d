"""A small model with random weights on a device, and the passes that the parts compare."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
from torch import Tensor

from millrace.bench.gpu.shapes import write_config
from millrace.core.config import EngineConfig
from millrace.engine.assembly import Engine, open_engines
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.kv.step_tables import page_table_of
from millrace.instance.stages.stages import open_staged_engine
from millrace.instance.transfer.transports import serve_member

PROMPT_TOKENS: Final = 150
_CUT: Final = 67  # tokens of the first chunk
_STEPS: Final = 4


@dataclass(frozen=True, slots=True)
class Prompt:
    """A random prompt, and its pages with room for a few tokens more."""

    ids: Tensor  # int64 [n] on the host
    pages: list[int]


@contextmanager
def small_engine(
    config: Mapping[str, Any],
    device: str,
    dtype: str,
    backend: str = "auto",
    ranks: Sequence[str] = (),
    stages: Sequence[str] = (),
) -> Iterator[Engine]:
    """Opens an engine with a pool of 64 MiB; the weights are the same on every device.

    `ranks`, `stages`: the devices of several ranks, or of several stages of one rank each. Each has
    a pool and a NIXL agent of its own.
    """
    with TemporaryDirectory() as name:
        settings = EngineConfig(
            device=device,
            dtype=dtype,
            load_format="dummy",
            attention_backend=backend,
            kv_bytes=64 << 20,
            tensor_parallel=max(1, len(ranks)),
            stages=max(1, len(stages)),
            kv_pools="own" if ranks or stages else "auto",
        )
        folder = write_config(Path(name) / "model", config)
        if stages:
            engine = open_staged_engine(
                str(folder), settings, "127.0.0.1", transport=serve_member, devices=stages
            )
        else:
            (engine,) = open_engines(folder, settings, 1, transport=serve_member, devices=ranks)
    try:
        yield engine
    finally:
        engine.close()


def new_prompt(engine: Engine, tokens: int, seed: int) -> Prompt:
    """Draws a prompt; the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    vocab = engine.runner.model.config.vocab_size
    ids = torch.randint(vocab, (tokens,), generator=generator)
    return Prompt(ids, engine.pool.allocate(engine.layout.pages_for(tokens + _STEPS)))


def task_of(prompt: Prompt, start: int, end: int) -> PrefillTask:
    """Returns the chunk [start, end) of a prompt."""
    return PrefillTask(token_ids=prompt.ids[start:end], history_tokens=start, pages=prompt.pages)


def logits_of(engine: Engine) -> Tensor:
    """Returns float32 [passes, vocab] on the host: a prompt in two chunks, then decode steps of
    it beside two shorter prompts. The fed tokens are fixed, so that one difference stays one.
    """
    prompts = [new_prompt(engine, n, seed) for seed, n in enumerate((PROMPT_TOKENS, 1, 40))]
    found = []
    for prompt in prompts:
        length = len(prompt.ids)
        bounds = [0, _CUT, length] if length > _CUT else [0, length]
        for start, end in pairwise(bounds):
            task = task_of(prompt, start, end)
            for _ in engine.runner.prefill_batch([task]):
                pass
            assert task.logits is not None  # the task asked for logits
            found.append(task.logits.float().cpu())
    table = page_table_of([prompt.pages for prompt in prompts])
    positions = torch.tensor([len(prompt.ids) for prompt in prompts])
    for step in range(_STEPS):
        fed = torch.tensor([3, 5, 7]) + step
        at = positions + step
        logits = engine.runner.decode(fed, at, table, (at + 1).int())
        found += list(logits.float().cpu())
    return torch.stack(found)
