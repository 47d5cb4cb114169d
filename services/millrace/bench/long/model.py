"""The model of `millrace bench long`: the small random Llama, with room for long contexts."""

from __future__ import annotations

from millrace.bench.common import models

LONG_LLAMA_27M = {**models.LLAMA_27M, "max_position_embeddings": 131_072}


def kv_bytes(tokens: int, dtype: str) -> int:
    """Returns the bytes of K/V of `tokens` tokens, all layers."""
    return models.kv_bytes(LONG_LLAMA_27M, tokens, dtype)
