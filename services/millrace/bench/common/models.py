"""The random models of benchmarks, in the terms of config.json. It imports nothing slow."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

LLAMA_100M: Mapping[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}
"""A Llama of about 100 million parameters."""

LLAMA_27M: Mapping[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 16_384,
    "tie_word_embeddings": True,
}
"""A Llama of 27 million parameters: several whole stacks of it fit on one machine."""


def kv_bytes(model: Mapping[str, Any], tokens: int, dtype: str) -> int:
    """Returns the bytes of K/V of `tokens` tokens, all layers."""
    head_dim = model["hidden_size"] // model["num_attention_heads"]
    heads = 2 * model["num_hidden_layers"] * model["num_key_value_heads"]
    return int(tokens * heads * head_dim * (4 if dtype == "float32" else 2))
