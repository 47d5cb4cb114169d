"""The decode batch alone in this process, which the served stack's decode is compared with."""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from pathlib import Path

import torch

from millrace.core.config import EngineConfig
from millrace.engine.assembly import open_engine
from millrace.engine.decode_batch import DecodeBatch, Sequence
from millrace.engine.sampling.sampler import Sampler
from millrace.engine.sampling.spec import SamplingSpec


class BareDecode:
    """A model and a KV pool filled with random numbers."""

    def __init__(self, folder: Path, *, dtype: str, threads: int, kv_bytes: int) -> None:
        """threads: compute threads, 0: all cores of the process."""
        config = EngineConfig(dtype=dtype, threads=threads, kv_bytes=kv_bytes, device="cpu")
        self._engine = open_engine(folder, config)
        self._engine.pool.storage.normal_()

    def tokens_per_s(self, context_tokens: Many[int], steps: int) -> float:
        """Measures greedy `DecodeBatch.step`s of one sequence per context, after one warm-up
        step.
        """
        pool, layout = self._engine.pool, self._engine.layout
        batch = DecodeBatch(self._engine.runner, pool, Sampler(), max_batch=len(context_tokens))
        spec = SamplingSpec(max_tokens=steps + 3, temperature=0.0)
        held = []
        for number, tokens in enumerate(context_tokens):
            pages = pool.allocate(layout.pages_for(tokens + spec.max_tokens))
            held += pages
            batch.add(
                Sequence(
                    request_id=str(number),
                    choice=0,
                    pages=pages,
                    prompt_tokens=tokens,
                    first_token_id=0,
                    spec=spec,
                )
            )
        with torch.inference_mode():
            batch.step()
            begun = time.perf_counter()
            for _ in range(steps):
                batch.step()
            took_s = time.perf_counter() - begun
        pool.free(held)
        return len(context_tokens) * steps / took_s
