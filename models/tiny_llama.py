"""A compact Llama for training the small model, with Hugging Face's weight names.

RMSNorm before each block, rotary positions (the half-split form), grouped-query attention, a SwiGLU
feed-forward and tied embeddings: the shapes that `LlamaForCausalLM` loads. Touvron et al., "LLaMA",
2023; Ainslie et al., "GQA", 2023; Su et al., "RoFormer", 2021.

Shape letters: b batch, l sequence, h query heads, k key/value heads, d head size.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TinyConfig:
    """Sizes of the model; `hf_dict` writes them as a Hugging Face config.json."""

    vocab_size: int
    hidden_size: int = 256
    intermediate_size: int = 448
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    rope_theta: float = 200_000.0
    norm_eps: float = 1e-5
    max_context_tokens: int = 16_384

    def hf_dict(self, *, bos_id: int, eos_ids: list[int], pad_id: int) -> dict[str, object]:
        """The keys that `transformers` 4 and 5 and other readers of Llama folders expect."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": self.vocab_size,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_context_tokens,
            "rms_norm_eps": self.norm_eps,
            "rope_theta": self.rope_theta,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "attention_bias": False,
            "mlp_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
            "bos_token_id": bos_id,
            "eos_token_id": eos_ids,
            "pad_token_id": pad_id,
            "torch_dtype": "bfloat16",
            "use_cache": True,
        }


def rope_tables(config: TinyConfig, positions_l: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines, float32 [l, d / 2], of the rotary angles at `positions_l`."""
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    angles = positions_l.float()[:, None] * (config.rope_theta**-exponents)[None, :]
    return angles.cos(), angles.sin()


def rotate(x_bhld: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn (first half, second half) of every head by the angle of its position."""
    low, high = x_bhld.chunk(2, dim=-1)
    cos, sin = cos.to(x_bhld.dtype), sin.to(x_bhld.dtype)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


class RmsNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, (x.shape[-1],), self.weight.to(x.dtype), self.eps)


class Attention(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.size = (
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
        )
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(self.heads * self.size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q_bhld = self.q_proj(x).view(batch, length, self.heads, self.size).transpose(1, 2)
        k_bkld = self.k_proj(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        v_bkld = self.v_proj(x).view(batch, length, self.kv_heads, self.size).transpose(1, 2)
        repeat = self.heads // self.kv_heads
        out = functional.scaled_dot_product_attention(
            rotate(q_bhld, cos, sin),
            rotate(k_bkld, cos, sin).repeat_interleave(repeat, dim=1),
            v_bkld.repeat_interleave(repeat, dim=1),
            is_causal=True,
        )
        flat: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return flat


class FeedForward(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = FeedForward(config)
        self.input_layernorm = RmsNorm(config.hidden_size, config.norm_eps)
        self.post_attention_layernorm = RmsNorm(config.hidden_size, config.norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Backbone(nn.Module):
    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.norm = RmsNorm(config.hidden_size, config.norm_eps)

    def forward(self, ids_bl: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x: Tensor = self.embed_tokens(ids_bl)
        for layer in self.layers:
            x = layer(x, cos, sin)
        out: Tensor = self.norm(x)
        return out


class TinyLlama(nn.Module):
    """`forward` gives logits [b, l, vocab]; the embedding is also the output matrix."""

    def __init__(self, config: TinyConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        scale = 1.0 / math.sqrt(2 * config.num_layers)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=0.02 * (scale if residual else 1.0))

    def attention(self, layer: int) -> Attention:
        """The attention block of one layer."""
        block = self.model.layers[layer]
        assert isinstance(block, Layer)
        return block.self_attn

    def hidden(self, ids_bl: Tensor, positions_l: Tensor) -> Tensor:
        """The last layer's output after the final norm, [b, l, hidden]."""
        cos, sin = rope_tables(self.config, positions_l)
        out: Tensor = self.model(ids_bl, cos, sin)
        return out

    def forward(self, ids_bl: Tensor) -> Tensor:
        positions_l = torch.arange(ids_bl.shape[1])
        hidden = self.hidden(ids_bl, positions_l)
        return functional.linear(hidden, self.model.embed_tokens.weight)
