"""Tiny models that split four ways, and groups of ranks that run them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from millrace.core.kv_layout import KvLayout
from millrace.engine.loader import Model
from millrace.engine.parallel.group_runner import GroupRunner, load_ranks
from millrace.engine.parallel.rank_group import RankGroup
from support.tiny_models import VARIANTS, model_folder

#: Every family, window, bias, tied embedding and mixture there is; qwen2 has one head a rank at 2.
SPLIT_FOUR_WAYS = {
    "llama-mha-sharded": (8, 8),
    "llama3-rope-tied": (8, 4),
    "llama-linear-biased": (4, 4),
    "mistral-window": (8, 4),
    "qwen2-yarn-window": (8, 2),
    "qwen3-layer-types": (4, 4),
    "mixtral": (8, 4),
    "qwen3-moe-mixed": (4, 4),
}


def split_folder(name: str) -> Path:
    """The folder of a variant with (attention heads, KV heads) that four ranks can share."""
    heads, kv_heads = SPLIT_FOUR_WAYS[name]
    variant = VARIANTS[name]
    counts = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    VARIANTS[f"{name}-split"] = replace(variant, overrides={**variant.overrides, **counts})
    return model_folder(f"{name}-split")


def open_runner(
    group: RankGroup, folder: Path, *, dtype: str = "float32", num_pages: int = 64, **load: str
) -> GroupRunner:
    model = load_ranks(group, folder, dtype=dtype, **load)
    return GroupRunner(group, model, rank_layout(model, num_pages))


def rank_layout(model: Model, num_pages: int, page_tokens: int = 16) -> KvLayout:
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
