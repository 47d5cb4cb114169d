"""Small engines on the fake CUDA device or the host, and batches that tests decode with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from millrace.bench.gpu.shapes import FAMILIES, write_config
from millrace.core.config import EngineConfig
from millrace.engine.assembly import Engine, open_engine
from millrace.engine.decode_batch import DecodeBatch, Sequence
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.sampling.sampler import Sampler
from millrace.engine.sampling.spec import SamplingSpec
from millrace_kernels.triton_backend import configs

TINY: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "num_hidden_layers": 2,
    "max_position_embeddings": 256,
}
"""Sizes that Triton's interpreter computes in a moment."""


@contextmanager
def tiles() -> Iterator[None]:
    """Uses tiles that fit the tiny sizes; attention cuts 64 K/V slots into two pieces."""
    one = {"num_warps": 1, "num_stages": 1, "block_k": 32, "block_n": 64}
    few = {**one, "block_m": 16, "block_n": 16, "split_slots": 32}
    with configs.trying(
        attend_few=few,
        attend_rows={**few, "block_m": 32, "split_slots": 64},
        skinny_linear=one,
        experts_few={**one, "block_m": 4},
        experts_rows={**one, "block_m": 16},
    ):
        yield


def device_engine(family: str, device: str, **settings: Any) -> Engine:
    """Opens an engine of a family with random weights, the same on every device."""
    sizes = settings.pop("sizes", {})
    small = {"kv_bytes": 1 << 20, "max_batch": 8, "page_tokens": 16}
    given = {"load_format": "dummy", **small, **settings}
    with TemporaryDirectory() as folder:
        config = write_config(Path(folder) / "model", {**FAMILIES[family], **sizes})
        return open_engine(config, EngineConfig(device=device, **given))


def prefilled(engine: Engine, name: str, tokens: int, spec: SamplingSpec) -> Sequence:
    """Prefills a prompt of so many tokens; its first token is the likeliest."""
    pages = engine.pool.allocate(engine.layout.pages_for(tokens + spec.max_tokens))
    ids = (torch.arange(tokens) * 7 + len(name)) % engine.shape.vocab_size
    task = PrefillTask(token_ids=ids, history_tokens=0, pages=pages)
    with torch.inference_mode():
        for _ in engine.runner.prefill_batch([task]):
            pass
        assert task.logits is not None
        first = int(task.logits.argmax())
    return Sequence(
        request_id=name,
        choice=0,
        pages=pages,
        prompt_tokens=tokens,
        first_token_id=first,
        spec=spec,
        prompt_ids=ids.tolist(),
    )


def capture(engine: Engine) -> None:
    """Captures the graphs of short prefills."""
    with torch.inference_mode():  # as all passes of these tests
        engine.runner.capture_prefills()


def new_batch(engine: Engine, *, runs_ahead: bool = False) -> DecodeBatch:
    """Returns an empty batch that the engine's decode steps follow."""
    batch = DecodeBatch(engine.runner, engine.pool, Sampler(), max_batch=8, runs_ahead=runs_ahead)
    with torch.inference_mode():
        engine.runner.follow(batch.page_table)
    return batch
