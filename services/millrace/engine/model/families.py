"""The differences between the model families; all else is common to them.

All are pre-norm decoders with RMSNorm, rotary positions, grouped-query attention and a SwiGLU MLP
or a mixture of such.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto


class Bias(Enum):
    """Which projections have biases."""

    NEVER = auto()
    QKV = auto()  # always on q, k and v; never on o
    CONFIG = auto()  # q, k, v and o when the config's `attention_bias` says so


class Window(Enum):
    """Which layers slide when the config has a `sliding_window`."""

    NEVER = auto()
    ALL = auto()  # every layer
    ALL_IF_USED = auto()  # every layer, with `use_sliding_window`
    BY_LAYER = auto()  # `layer_types`, or layers from `max_window_layers` on; `use_sliding_window`


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertNames:
    """Where a family's checkpoint keeps a layer's experts, below ``model.layers.N``."""

    block: str
    gate: str  # of an expert
    up: str
    down: str
    count_fields: tuple[str, ...]  # config fields that may hold the number of experts
    size_field: str  # config field: width of an expert
    always_normalised: bool  # top-k router weights sum to one whatever the config says


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The deviations of one family."""

    name: str
    attention_bias: Bias = Bias.NEVER
    mlp_bias: bool = False  # reads the config's `mlp_bias`
    qk_norm: bool = False
    window: Window = Window.NEVER
    experts: ExpertNames | None = None
    default_rope_theta: float = 10000.0
    default_norm_eps: float = 1e-6
    default_head_dim: int | None = None  # None: hidden_size / num_attention_heads
    default_window: int | None = None  # when the config does not name `sliding_window` at all


_MIXTRAL_EXPERTS = ExpertNames(
    block="block_sparse_moe",
    gate="w1",
    up="w3",
    down="w2",
    count_fields=("num_local_experts", "num_experts"),
    size_field="intermediate_size",
    always_normalised=True,
)
_QWEN3_EXPERTS = ExpertNames(
    block="mlp",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    count_fields=("num_experts", "num_local_experts"),
    size_field="moe_intermediate_size",
    always_normalised=False,
)

LLAMA = Family(name="llama", attention_bias=Bias.CONFIG, mlp_bias=True)
MISTRAL = Family(name="mistral", window=Window.ALL, default_window=4096)
QWEN2 = Family(name="qwen2", attention_bias=Bias.QKV, window=Window.BY_LAYER, default_window=4096)
QWEN3 = Family(
    name="qwen3",
    attention_bias=Bias.CONFIG,
    qk_norm=True,
    window=Window.BY_LAYER,
    default_head_dim=128,
    default_window=4096,
)
MIXTRAL = Family(
    name="mixtral",
    window=Window.ALL,
    experts=_MIXTRAL_EXPERTS,
    default_rope_theta=1e6,
    default_norm_eps=1e-5,
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    attention_bias=Bias.CONFIG,
    qk_norm=True,
    window=Window.ALL_IF_USED,
    default_window=4096,
    experts=_QWEN3_EXPERTS,
)

#: `architectures[0]` of a config.json.
ARCHITECTURES = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": MISTRAL,
    "Qwen2ForCausalLM": QWEN2,
    "Qwen3ForCausalLM": QWEN3,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen3MoeForCausalLM": QWEN3_MOE,
}
