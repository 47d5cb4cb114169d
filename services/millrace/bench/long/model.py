"""The model of `millrace bench long`: the small random Llama, with room for long contexts."""

from __future__ import annotations

from typing import Any

from millrace.bench.common.random_model import LLAMA_27M

LONG_LLAMA_27M: dict[str, Any] = {**LLAMA_27M, "max_position_embeddings": 131_072}


def kv_bytes(tokens: int, dtype: str) -> int:
    """Returns the bytes of K/V of `tokens` tokens, all layers."""
    model = LONG_LLAMA_27M
    head_dim = model["hidden_size"] // model["num_attention_heads"]
    element = 4 if dtype == "float32" else 2
    a_token = 2 * model["num_hidden_layers"] * model["num_key_value_heads"] * head_dim * element
    return int(tokens * a_token)
