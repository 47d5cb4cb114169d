"""A model's weights in the fused form of the operators, and the place of each part in a checkpoint.

One description (`WeightSpec`) serves loading, random weights and error messages: a weight's shape
and the checkpoint tensors that fill it. Matrices are [out, in].
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from enum import Enum, auto

import torch

from millrace.engine.model.config import ModelConfig


class WeightKind(Enum):
    """The kind of a weight, for random initialisation."""

    MATRIX = auto()
    NORM = auto()
    BIAS = auto()


@dataclass(frozen=True, slots=True)
class TensorPart:
    """One checkpoint tensor and the index of the fused weight that it fills.

    ``shape`` is the tensor's; ``source`` is the part of it that is taken, all where that is empty.
    """

    tensor: str
    shape: tuple[int, ...]
    index: tuple[int | slice, ...] = ()
    source: tuple[slice, ...] = ()


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One fused weight."""

    shape: tuple[int, ...]
    parts: tuple[TensorPart, ...]
    kind: WeightKind = WeightKind.MATRIX

    @property
    def elements(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One layer. Dense layers have gate_up and down; MoE layers router and the two stacks.

    H hidden, Q/K total width of the q / k heads, I intermediate, E experts, X expert width.
    """

    input_norm: torch.Tensor  # [H]
    qkv: torch.Tensor  # [Q + 2K, H]: q rows, then k, then v
    qkv_bias: torch.Tensor | None = None  # [Q + 2K]
    q_norm: torch.Tensor | None = None  # [head_dim]
    k_norm: torch.Tensor | None = None  # [head_dim]
    o: torch.Tensor  # [H, Q]
    o_bias: torch.Tensor | None = None  # [H]
    post_norm: torch.Tensor  # [H]
    gate_up: torch.Tensor | None = None  # [2I, H]: gate rows, then up
    gate_up_bias: torch.Tensor | None = None  # [2I]
    down: torch.Tensor | None = None  # [H, I]
    down_bias: torch.Tensor | None = None  # [H]
    router: torch.Tensor | None = None  # [E, H]
    experts_gate_up: torch.Tensor | None = None  # [E, 2X, H]
    experts_down: torch.Tensor | None = None  # [E, H, X]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """All weights. With tied embeddings ``lm_head`` is ``embedding``.

    A stage has its layers; the weights outside the layers are None except at the first stage.
    """

    embedding: torch.Tensor | None = None  # [vocab, H]
    layers: tuple[LayerWeights, ...]
    final_norm: torch.Tensor | None = None  # [H]
    lm_head: torch.Tensor | None = None  # [vocab, H]

    @property
    def num_bytes(self) -> int:
        """Returns the bytes of all distinct weights."""
        tensors = [self.embedding, self.final_norm]
        if self.lm_head is not self.embedding:
            tensors.append(self.lm_head)
        for layer in self.layers:
            tensors.extend(getattr(layer, f.name) for f in fields(layer))
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def outer_specs(config: ModelConfig) -> dict[str, WeightSpec]:
    """Returns the specs of the weights outside the layers, by field of `ModelWeights`."""
    table = (config.vocab_size, config.hidden_size)
    specs = {
        "embedding": _whole("model.embed_tokens.weight", table),
        "final_norm": _whole("model.norm.weight", (config.hidden_size,), WeightKind.NORM),
    }
    if not config.tie_embeddings:
        specs["lm_head"] = _whole("lm_head.weight", table)
    return specs


def layer_specs(config: ModelConfig, layer: int) -> dict[str, WeightSpec]:
    """Returns the specs of one layer's weights, by field of `LayerWeights`."""
    prefix = f"model.layers.{layer}."
    hidden = config.hidden_size
    specs = {
        "input_norm": _whole(f"{prefix}input_layernorm.weight", (hidden,), WeightKind.NORM),
        "post_norm": _whole(f"{prefix}post_attention_layernorm.weight", (hidden,), WeightKind.NORM),
    }
    specs |= _attention_specs(config, f"{prefix}self_attn.")
    if config.is_moe(layer):
        return specs | _expert_specs(config, prefix)
    return specs | _mlp_specs(config, f"{prefix}mlp.")


def _attention_specs(config: ModelConfig, prefix: str) -> dict[str, WeightSpec]:
    sizes = {"q_proj": config.q_size, "k_proj": config.kv_size, "v_proj": config.kv_size}
    specs = {
        "qkv": _rows(prefix, sizes, ".weight", (config.hidden_size,)),
        "o": _whole(f"{prefix}o_proj.weight", (config.hidden_size, config.q_size)),
    }
    if config.qkv_bias:
        specs["qkv_bias"] = _rows(prefix, sizes, ".bias", (), WeightKind.BIAS)
    if config.o_bias:
        specs["o_bias"] = _whole(f"{prefix}o_proj.bias", (config.hidden_size,), WeightKind.BIAS)
    if config.qk_norm:
        specs["q_norm"] = _whole(f"{prefix}q_norm.weight", (config.head_dim,), WeightKind.NORM)
        specs["k_norm"] = _whole(f"{prefix}k_norm.weight", (config.head_dim,), WeightKind.NORM)
    return specs


def _mlp_specs(config: ModelConfig, prefix: str) -> dict[str, WeightSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size
    sizes = {"gate_proj": inner, "up_proj": inner}
    specs = {
        "gate_up": _rows(prefix, sizes, ".weight", (hidden,)),
        "down": _whole(f"{prefix}down_proj.weight", (hidden, inner)),
    }
    if config.mlp_bias:
        specs["gate_up_bias"] = _rows(prefix, sizes, ".bias", (), WeightKind.BIAS)
        specs["down_bias"] = _whole(f"{prefix}down_proj.bias", (hidden,), WeightKind.BIAS)
    return specs


def _expert_specs(config: ModelConfig, prefix: str) -> dict[str, WeightSpec]:
    moe, names = config.moe, config.family.experts
    assert moe is not None and names is not None  # `is_moe` said so
    hidden, inner, count = config.hidden_size, moe.intermediate_size, moe.num_experts
    block = f"{prefix}{names.block}."
    gate_up: list[TensorPart] = []
    down: list[TensorPart] = []
    for e in range(count):
        expert = f"{block}experts.{e}."
        up_rows = slice(inner, 2 * inner)
        gate_up.append(
            TensorPart(f"{expert}{names.gate}.weight", (inner, hidden), (e, slice(0, inner)))
        )
        gate_up.append(TensorPart(f"{expert}{names.up}.weight", (inner, hidden), (e, up_rows)))
        down.append(TensorPart(f"{expert}{names.down}.weight", (hidden, inner), (e,)))
    return {
        "router": _whole(f"{block}gate.weight", (count, hidden)),
        "experts_gate_up": WeightSpec((count, 2 * inner, hidden), tuple(gate_up)),
        "experts_down": WeightSpec((count, hidden, inner), tuple(down)),
    }


def _whole(tensor: str, shape: tuple[int, ...], kind: WeightKind = WeightKind.MATRIX) -> WeightSpec:
    return WeightSpec(shape, (TensorPart(tensor, shape),), kind)


def _rows(
    prefix: str,
    sizes: dict[str, int],
    suffix: str,
    tail: tuple[int, ...],
    kind: WeightKind = WeightKind.MATRIX,
) -> WeightSpec:
    """Returns the spec of several tensors stacked along the first dimension."""
    parts, start = [], 0
    for name, size in sizes.items():
        rows = (slice(start, start + size),)
        parts.append(TensorPart(f"{prefix}{name}{suffix}", (size, *tail), rows))
        start += size
    return WeightSpec((start, *tail), tuple(parts), kind)
