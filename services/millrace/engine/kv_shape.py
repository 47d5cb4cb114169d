"""A model's shape, and how large the KV pools of its engine are."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import torch

from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.core.kv.layout import KvLayout
from millrace.engine.model.config import ModelConfig
from millrace.engine.model.loader import model_hash as hash_of
from millrace.engine.parallel.member_pools import has_own_pools
from millrace.model_folder import resolve_model


def dtype_of(model: ModelConfig, config: EngineConfig) -> str:
    """Returns the dtype in which a model is computed."""
    return model.dtype if config.dtype == "auto" else config.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """A model's shape and the layout of its KV pools."""

    folder: Path
    model: ModelConfig  # the whole
    layout: KvLayout
    max_context_tokens: int

    @classmethod
    def of_one_page(
        cls,
        model: str | Path,
        config: EngineConfig,
        device: torch.device,
        revision: str = "",
        *,
        model_hash: str = "",
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Returns the shape of an engine whose pools have one page.

        `model_hash`, `dtype`: of loaded weights, with the revision; without them no weight is read.
        Raises ModelError for a model that can't be served and ConfigError for settings that it
        can't meet.
        """
        folder = resolve_model(model)
        whole = ModelConfig.from_folder(folder)
        ranks, is_own = config.tensor_parallel, has_own_pools(config, device)
        parts = min(ranks, whole.num_kv_heads)
        if not model_hash:
            model_hash = revised(hash_of(folder, load_format=config.load_format), revision)
        if dtype is None:
            dtype = getattr(torch, dtype_of(whole, config))
        layout = KvLayout(
            model_hash=model_hash,
            dtype=str(dtype).removeprefix("torch."),
            num_layers=whole.num_layers,
            num_kv_heads=whole.num_kv_heads,
            head_dim=whole.head_dim,
            page_tokens=config.page_tokens_on(device.type),
            head_start=0,
            head_count=whole.num_kv_heads,
            num_pages=1,
            parts=parts,
            copies=ranks // parts if is_own else 1,
            stages=config.stages if is_own else 1,
        )
        context = _context(config, whole, folder)
        return cls(folder=folder, model=whole, layout=layout, max_context_tokens=context)

    @property
    def least_bytes(self) -> int:
        """Returns the bytes for the longest context, which all pools together have on the host."""
        return self.max_context_tokens * self.layout.bytes_per_token

    def sized(self, size_bytes: int) -> Self:
        """Returns the shape with pools of so many bytes together. Raises ConfigError when they
        have no room for one page."""
        each = self.layout.page_of_all_bytes
        if size_bytes < each:
            raise ConfigError(
                f"engine.kv_bytes is {size_bytes}; one page of this model takes {each}"
            )
        return replace(self, layout=replace(self.layout, num_pages=size_bytes // each))

    def with_pages(self, pages: int, config: EngineConfig) -> Self:
        """Returns the shape with so many pages in every pool. Raises ConfigError for none."""
        if pages < 1:
            size = f"engine.kv_bytes is {config.kv_bytes}" if config.kv_bytes else "KV has no room"
            each = self.layout.page_of_all_bytes
            raise ConfigError(f"{size}; one page of this model takes {each}")
        return replace(self, layout=replace(self.layout, num_pages=pages))


def revised(model_hash: str, revision: str) -> str:
    """Returns the hash under which KV of this revision of the model is exchanged."""
    return f"{model_hash}@{revision}" if revision else model_hash


def _context(config: EngineConfig, model: ModelConfig, folder: Path) -> int:
    context = config.max_context_tokens or model.max_context_tokens
    if context > model.max_context_tokens:
        raise ConfigError(
            f"engine.max_context_tokens is {context}; {folder} allows at most "
            f"{model.max_context_tokens}"
        )
    return context
