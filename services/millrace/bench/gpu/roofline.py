"""A roofline model of a forward pass: the times that a device's peaks allow.

Williams, Waterman, Patterson, *Roofline* (CACM 2009): work of f FLOPs that moves m bytes takes at
least max(f / P, m / B) seconds, at P FLOP/s and B bytes/s. Prefill is bound by P, decode by B. The
counts are the least: no activation travels through memory, all expert assignments of a step are
independent and uniform, and a copy reads and writes at B in total.

Symbols: l layers, H hidden, h heads and k K/V heads of d numbers, V vocabulary, E experts of which
each token has t, b sequences, n tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from millrace.engine.model.config import ModelConfig

PREFILL_SHARE: Final = 0.65
"""The share of the measured GEMM peak that a prefill is asked to reach."""
DECODE_SHARE: Final = 0.8
"""The share of the measured copy bandwidth that a decode step is asked to reach."""


@dataclass(frozen=True, slots=True)
class Peaks:
    """A device's peaks, measured or from its data sheet."""

    flops_per_s: float
    bytes_per_s: float


def _attention_parameters(model: ModelConfig) -> int:
    """Returns the parameters of a layer's qkv and o projections."""
    return model.hidden_size * (2 * model.q_size + 2 * model.kv_size)


def _mlp_parameters(model: ModelConfig, layer: int, experts: float) -> float:
    """Returns the parameters of a layer's MLP that are used when so many experts are."""
    if not model.is_moe(layer):
        return 3.0 * model.hidden_size * model.intermediate_size
    assert model.moe is not None  # the layer is an MoE layer
    router = model.hidden_size * model.moe.num_experts
    return router + experts * 3.0 * model.hidden_size * model.moe.intermediate_size


def prefill_flops(model: ModelConfig, tokens: int, history: int = 0) -> float:
    """Returns the FLOPs of a chunk of n tokens after `history` tokens, with the logits of its last.

        linear     2 n sum of the layers' used parameters + 2 H V
        attention  4 h d l (n history + n (n + 1) / 2)

    A multiply-add counts two. Windows are not counted: the value is then too large.
    """
    chosen = 0 if model.moe is None else model.moe.experts_per_token
    used = sum(
        _attention_parameters(model) + _mlp_parameters(model, layer, chosen)
        for layer in range(model.num_layers)
    )
    seen = tokens * history + tokens * (tokens + 1) / 2
    attention = 4.0 * model.q_size * model.num_layers * seen
    return 2.0 * (tokens * used + model.hidden_size * model.vocab_size) + attention


def decode_bytes(model: ModelConfig, batch: int, context: int, element_bytes: int = 2) -> float:
    """Returns the bytes that a decode step of b sequences of `context` tokens reads.

    Every matrix once, all K/V, and of an MoE layer the experts that at least one of the b t
    independent, uniform assignments chooses: E (1 - (1 - t / E)^b).
    """
    read = 0.0
    if model.moe is not None:
        share = model.moe.experts_per_token / model.moe.num_experts
        read = model.moe.num_experts * (1.0 - (1.0 - share) ** batch)
    weights = sum(
        _attention_parameters(model) + _mlp_parameters(model, layer, read)
        for layer in range(model.num_layers)
    )
    weights += model.hidden_size * model.vocab_size
    kv = 2.0 * model.num_layers * model.kv_size * batch * context
    return element_bytes * (weights + kv)


def expected_prefill(model: ModelConfig, tokens: int, peaks: Peaks) -> float:
    """Returns tokens/s of a prompt of n tokens at `PREFILL_SHARE` of the peak."""
    return PREFILL_SHARE * peaks.flops_per_s * tokens / prefill_flops(model, tokens)


def expected_decode(model: ModelConfig, batch: int, context: int, peaks: Peaks) -> float:
    """Returns tokens/s of b sequences at `DECODE_SHARE` of the bandwidth."""
    return DECODE_SHARE * peaks.bytes_per_s * batch / decode_bytes(model, batch, context)
