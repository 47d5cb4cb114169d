"""The models of `millrace bench gpu`, in the terms of config.json; their weights are random."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_SMALL: Mapping[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 384,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def _small(architecture: str, model_type: str, **more: object) -> dict[str, Any]:
    return {**_SMALL, "architectures": [architecture], "model_type": model_type, **more}


FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": _small("LlamaForCausalLM", "llama"),
    "mistral": _small("MistralForCausalLM", "mistral", sliding_window=24),
    "qwen2": _small("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _small("Qwen3ForCausalLM", "qwen3"),
    "mixtral": _small("MixtralForCausalLM", "mixtral", num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": _small(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=128,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
}
"""A small model of every family, with the heads of the large ones: FlashInfer takes them."""

LLAMA_3_8B: Mapping[str, Any] = _small(
    "LlamaForCausalLM",
    "llama",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131_072,
    rope_theta=500_000.0,
)
QWEN3_30B_A3B: Mapping[str, Any] = _small(
    "Qwen3MoeForCausalLM",
    "qwen3_moe",
    vocab_size=151_936,
    hidden_size=2048,
    intermediate_size=6144,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    max_position_embeddings=40_960,
    num_experts=128,
    num_experts_per_tok=8,
    moe_intermediate_size=768,
    norm_topk_prob=True,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    rope_theta=1_000_000.0,
)


def write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    """Writes config.json, all that a model with random weights needs. Returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    return folder
