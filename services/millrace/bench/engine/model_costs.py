"""Counts the FLOPs and bytes of a Llama's forward pass, from its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def _layer_parameters(model: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the parameters of one layer's qkv projection, and of its other matrices."""
    hidden = model["hidden_size"]
    qkv = hidden * (hidden + 2 * _kv_width(model))
    return qkv, hidden * hidden + 3 * hidden * model["intermediate_size"]


def _kv_width(model: Mapping[str, Any]) -> int:
    head_dim: int = model["hidden_size"] // model["num_attention_heads"]
    return head_dim * int(model["num_key_value_heads"])


def prefill_flops(model: Mapping[str, Any], tokens: int) -> float:
    """Returns the least FLOPs for the last position's logits of one prompt of n tokens.

    With l layers, q the parameters of a layer's qkv projection, r of its other matrices, H the
    hidden size (heads times head_dim) and V the vocabulary:

        linear     2 n (l q + (l - 1) r) + 2 (r + V H)
        attention  4 H (l - 1) n (n + 1) / 2 + 4 H n

    A multiply-add counts two. Each position attends to itself and all earlier positions. Of the
    last layer, only K and V of the other positions are used (their q, in one product with them, is
    counted): an engine that computes all of it does up to 1/l more FLOPs.
    """
    layers, hidden = int(model["num_hidden_layers"]), int(model["hidden_size"])
    qkv, rest = _layer_parameters(model)
    linear = 2.0 * tokens * (layers * qkv + (layers - 1) * rest)
    linear += 2.0 * (rest + int(model["vocab_size"]) * hidden)
    attention = 4.0 * hidden * ((layers - 1) * tokens * (tokens + 1) / 2 + tokens)
    return linear + attention


def decode_step_bytes(
    model: Mapping[str, Any], batch: int, context_tokens: int, element_bytes: int
) -> float:
    """Returns the bytes that one decode step reads: every matrix once, with the output's, and all
    K/V.

    The embedding's few rows, norms and activations are left out.
    """
    layers, hidden = model["num_hidden_layers"], model["hidden_size"]
    weights = layers * sum(_layer_parameters(model)) + model["vocab_size"] * hidden
    kv = 2 * layers * _kv_width(model) * batch * context_tokens
    return float(element_bytes * (weights + kv))
