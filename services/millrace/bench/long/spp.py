"""Measures the speedup of a long prompt by stages (SPP, Mnemosyne section 4.3 and Figure 17).

A prompt's chunks follow each other through instances of several stages, with one thread per stage.
On as many cores of its own a chain of s stages takes 1/s of one stage's time, plus the time to fill
and empty it, to send rows between stages, and to wait for the slowest stage. Stages beyond the
machine's cores share cores: efficiency counts the existing cores.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import torch

from millrace.bench.common.options import Announce
from millrace.bench.long.mixed import Document
from millrace.bench.long.model import kv_bytes
from millrace.container_limits import usable_cores
from millrace.core.config import EngineConfig
from millrace.engine.assembly import Engine, open_engine
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.instance.stages.stages import open_staged_engine
from millrace.transfer.transport.regions import Memory
from millrace.transfer.transport.runs import Runs
from millrace.transfer.transport.sums import crc_of

_HOST = "127.0.0.1"
_SUMS = 50


def stages(
    model: Path,
    *,
    dtype: str,
    degrees: Sequence[int],
    prompt_tokens: int,
    chunk_tokens: int,
    repeats: int,
    announce: Announce,
) -> Document:
    """Returns seconds of a prompt, of the same with checksums of its activations, and of its first
    chunk alone, by stages; the best of several runs. `sum_s`: for the checksum of a chunk's rows.
    """
    cores = usable_cores()
    rows: list[Document] = []
    sum_s = 0.0
    for degree in degrees:
        announce(f"spp: {degree} stages" if degree > 1 else "spp: one stage")
        config = EngineConfig(
            device="cpu",
            dtype=dtype,
            threads=degree,
            stages=degree,
            kv_bytes=kv_bytes(prompt_tokens + chunk_tokens, dtype),
            max_chunk_tokens=chunk_tokens,
        )
        opened = open_staged_engine(str(model), config, _HOST) if degree > 1 else None
        with closing(opened or open_engine(model, config)) as engine:
            whole = _best_s(engine, prompt_tokens, chunk_tokens, repeats)
            one = _best_s(engine, chunk_tokens, chunk_tokens, repeats)
        row: Document = {"stages": degree, "prompt_s": whole, "chunk_s": one}
        if degree > 1:
            checked = open_staged_engine(str(model), config, _HOST, checksums=True)
            with closing(checked) as engine:  # after the other: an open engine polls
                row["checked_s"] = _best_s(engine, prompt_tokens, chunk_tokens, repeats)
                sum_s = _sum_s(engine, chunk_tokens)
        rows.append(row)
    first = rows[0]
    for row in rows:
        row["speedup"] = first["prompt_s"] / row["prompt_s"]
        row["efficiency"] = row["speedup"] / min(row["stages"], cores)
        if "checked_s" in row:
            row["checked_over_prompt"] = row["checked_s"] / row["prompt_s"]
    return {
        "prompt_tokens": prompt_tokens,
        "chunk_tokens": chunk_tokens,
        "cores": cores,
        "sum_s": sum_s,
        "rows": rows,
    }


def _best_s(engine: Engine, tokens: int, chunk_tokens: int, repeats: int) -> float:
    _prompt_s(engine, 2 * chunk_tokens, chunk_tokens)  # warm
    return min(_prompt_s(engine, tokens, chunk_tokens) for _ in range(repeats))


def _sum_s(engine: Engine, chunk_tokens: int) -> float:
    """Returns seconds in which one end of a hop sums the rows of a chunk; the best of several."""
    hidden, dtype = engine.shape.hidden_size, engine.storage.dtype
    rows = Memory.of_tensor(torch.zeros(chunk_tokens, hidden, dtype=dtype))
    whole, times = Runs.of(0, 0, rows.nbytes), []
    for _ in range(_SUMS):
        start_s = time.perf_counter()
        crc_of(rows, whole)
        times.append(time.perf_counter() - start_s)
    return min(times)


def _prompt_s(engine: Engine, tokens: int, chunk_tokens: int) -> float:
    """Returns seconds from the first chunk's start to the last chunk's logits."""
    pages = engine.pool.allocate(engine.layout.pages_for(tokens))
    bounds = [*range(0, tokens, chunk_tokens), tokens]
    start_s = time.perf_counter()
    for start, stop in pairwise(bounds):
        task = PrefillTask(
            token_ids=torch.arange(start, stop) % engine.shape.vocab_size,
            history_tokens=start,
            pages=pages,
            want_logits=stop == tokens,
        )
        for boundary in engine.runner.prefill_batch([task]):
            if boundary.awaited is not None:
                boundary.awaited.wait()
    took_s = time.perf_counter() - start_s
    engine.pool.free(pages)
    return took_s
