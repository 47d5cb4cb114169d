"""Millrace and transformers as engines of `millrace bench engine`."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Protocol

import torch
from torch import Tensor

from millrace.core.arithmetic import ceil_div
from millrace.core.config import EngineConfig
from millrace.core.errors import MillraceError
from millrace.core.kv.layout import KvLayout
from millrace.engine.assembly import alike_of
from millrace.engine.forward.local_runner import ModelRunner
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.forward.stage_passes import StagePasses
from millrace.engine.kv.pool import KvPool
from millrace.engine.model.loader import load_model
from millrace_kernels import determinism

PAGE_TOKENS = 16


def _transformers() -> ModuleType:
    """Imports the package, only when the engine is compared with it."""
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise MillraceError(
            "transformers is not installed; it comes with `pip install 'millrace[dev]'`"
        ) from error


class Engine(Protocol):
    """An engine with its weights loaded, and its timed operations."""

    def prefill(self, prompt: Tensor) -> Tensor:
        """Takes int64 [n]; returns logits [vocab] of its last position, valid until the next
        call.
        """

    def start_decode(self, batch: int, context_tokens: int) -> Callable[[Tensor], Tensor]:
        """Gives `batch` sequences a random context and returns their step.

        A step takes token ids int64 [batch] and returns the next ids.
        """


class MillraceEngine:
    """The model runner over a paged pool that fits the largest case.

    The process has the kernels of `engine.deterministic`, here `deterministic`, while the engine
    is made or runs.
    """

    def __init__(
        self, folder: Path, dtype: str, pool_tokens: int, deterministic: str = "auto"
    ) -> None:
        config = EngineConfig(device="cpu", dtype=dtype, deterministic=deterministic)
        self._alike = alike_of(folder, config, torch.device("cpu"))
        model = load_model(folder, device="cpu", dtype=dtype)
        shape = model.config
        layout = KvLayout(
            model_hash=model.hash,
            dtype=dtype,
            num_layers=shape.num_layers,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            page_tokens=PAGE_TOKENS,
            head_start=0,
            head_count=shape.num_kv_heads,
            num_pages=ceil_div(pool_tokens, PAGE_TOKENS),
        )
        self._pool = KvPool(layout)
        self._pool.storage.normal_()
        with determinism.switched(self._alike):  # linears choose their kernels here
            self._runner = ModelRunner(StagePasses(model, self._pool))

    def prefill(self, prompt: Tensor) -> Tensor:
        pages = self._pool.allocate(ceil_div(len(prompt), PAGE_TOKENS))
        task = PrefillTask(token_ids=prompt, history_tokens=0, pages=pages)
        with determinism.switched(self._alike):
            for _ in self._runner.prefill_batch([task]):
                pass
        self._pool.free(pages)
        assert task.logits is not None  # the task asked for logits
        return task.logits

    def start_decode(self, batch: int, context_tokens: int) -> Callable[[Tensor], Tensor]:
        pages_each = self._pool.num_pages // batch
        table = torch.arange(batch * pages_each, dtype=torch.int32).view(batch, pages_each)
        positions = torch.full((batch,), context_tokens)
        kv_lens = torch.full((batch,), context_tokens + 1, dtype=torch.int32)

        def step(token_ids: Tensor) -> Tensor:
            with determinism.switched(self._alike):
                logits = self._runner.decode(token_ids, positions, table, kv_lens)
            positions.add_(1)
            kv_lens.add_(1)
            return logits.argmax(-1)

        return step


class TransformersEngine:
    """`LlamaForCausalLM` with sdpa attention and its KV cache."""

    def __init__(self, folder: Path, dtype: str) -> None:
        transformers = _transformers()
        transformers.utils.logging.disable_progress_bar()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        ).eval()
        self._new_cache = transformers.DynamicCache

    def prefill(self, prompt: Tensor) -> Tensor:
        out = self.model(input_ids=prompt[None], use_cache=True, logits_to_keep=1)
        logits: Tensor = out.logits[0, -1]
        return logits

    def start_decode(self, batch: int, context_tokens: int) -> Callable[[Tensor], Tensor]:
        config = self.model.config
        cache = self._new_cache(config=config)
        shape = (batch, config.num_key_value_heads, context_tokens, config.head_dim)
        for layer in range(config.num_hidden_layers):
            keys, values = torch.randn(2, *shape).to(self.model.dtype)
            cache.update(keys, values, layer)

        def step(token_ids: Tensor) -> Tensor:
            out = self.model(input_ids=token_ids[:, None], past_key_values=cache, use_cache=True)
            chosen: Tensor = out.logits[:, -1].argmax(-1)
            return chosen

        return step
