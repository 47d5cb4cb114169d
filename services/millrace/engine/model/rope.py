"""Rotary position embedding: the frequencies of every scaling rule that Millrace serves.

Sources: RoPE (Su et al. 2021), position interpolation (Chen et al. 2023, ``linear``), YaRN (Peng et
al. 2023), and the smoothed rule of Llama 3.1 (``llama3``). Angles and their cosines are computed in
float32 whatever the model's dtype: in bfloat16 positions past 256 would collapse.
"""

from __future__ import annotations

import math

import torch

from millrace.engine.model.rope_config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Returns float32 [head_dim / 2]: radians per position of every pair of dimensions."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "yarn":
        return _yarn(rope, plain, head_dim)
    return plain


class Rotary:
    """Cosines and sines of positions, computed at each call: a table would not fit long
    contexts."""

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device | str) -> None:
        self._inverse_frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._attention_factor = rope.attention_factor

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (cos, sin), float32 [n, head_dim / 2] each, of int64 positions [n]."""
        angles = positions.to(torch.float32)[:, None] * self._inverse_frequencies
        cos, sin = angles.cos(), angles.sin()
        if self._attention_factor != 1.0:
            cos.mul_(self._attention_factor)
            sin.mul_(self._attention_factor)
        return cos, sin


def _llama3(rope: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Scales long wavelengths by the factor, keeps short wavelengths, blends those between."""
    turns = rope.original_max_tokens * plain / (2 * math.pi)  # rotations over the first context
    stretched = plain / rope.factor
    share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - share) * stretched + share * plain
    return torch.where(
        turns < rope.low_freq_factor,
        stretched,
        torch.where(turns > rope.high_freq_factor, plain, blended),
    )


def _yarn(rope: RopeConfig, plain: torch.Tensor, head_dim: int) -> torch.Tensor:
    """NTK-by-parts (YaRN section 3.2): a ramp over dimensions from kept to interpolated."""

    def dimension_of(rotations: float) -> float:
        ratio = rope.original_max_tokens / (rotations * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    low, high = dimension_of(rope.beta_fast), dimension_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a step instead of a ramp, without dividing by zero
    dims = torch.arange(head_dim // 2, dtype=torch.float32)
    interpolated = ((dims - low) / (high - low)).clamp(0, 1)
    return plain / rope.factor * interpolated + plain * (1 - interpolated)
