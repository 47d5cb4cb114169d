"""Tiny random models of every family, made and saved by `transformers`, and its answers to them.

`transformers` is the oracle: the same weights, its eager attention, float32 unless told otherwise.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

transformers.utils.logging.disable_progress_bar()

VOCAB = 320

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0}


@dataclass(frozen=True)
class Variant:
    """One tiny model: `transformers`' config class and what it overrides."""

    config_class: str
    overrides: dict[str, Any] = field(default_factory=dict)
    shard_bytes: int | None = None  # saved in shards of at most this size


VARIANTS: dict[str, Variant] = {
    "llama": Variant("LlamaConfig", {"num_attention_heads": 4, "num_key_value_heads": 2}),
    "llama-mha-sharded": Variant(
        "LlamaConfig", {"num_key_value_heads": 6, "rms_norm_eps": 1e-5}, shard_bytes=60_000
    ),
    "llama3-rope-tied": Variant(
        "LlamaConfig",
        {
            "tie_word_embeddings": True,
            "eos_token_id": [2, 7],
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 128,
            },
        },
    ),
    "llama-linear-biased": Variant(
        "LlamaConfig",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 20,
            "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        },
    ),
    "llama-yarn-mscale": Variant(
        "LlamaConfig",
        {
            "rope_parameters": {
                **_YARN,
                "factor": 16.0,
                "original_max_position_embeddings": 256,
                "mscale": 1.0,
                "mscale_all_dim": 0.5,
                "truncate": False,
            }
        },
    ),
    "mistral-window": Variant("MistralConfig", {"sliding_window": 24, "head_dim": 16}),
    "mistral-no-window": Variant("MistralConfig", {"sliding_window": None}),
    "qwen2-tied": Variant("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen2-yarn-window": Variant(
        "Qwen2Config",
        {
            "use_sliding_window": True,
            "sliding_window": 16,
            "max_window_layers": 1,
            "rope_parameters": {
                **_YARN,
                "factor": 8.0,
                "original_max_position_embeddings": 512,
            },
        },
    ),
    "qwen3": Variant(
        "Qwen3Config", {"head_dim": 32, "num_attention_heads": 6, "num_key_value_heads": 3}
    ),
    "qwen3-layer-types": Variant(
        "Qwen3Config",
        {
            "head_dim": 8,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 20,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mixtral": Variant(
        "MixtralConfig",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
    ),
    "qwen3-moe": Variant(
        "Qwen3MoeConfig",
        {
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "head_dim": 16,
        },
    ),
    "qwen3-moe-mixed": Variant(
        "Qwen3MoeConfig",
        {
            "num_hidden_layers": 4,
            "num_experts": 5,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 16,
            "norm_topk_prob": False,
            "decoder_sparse_step": 2,
            "mlp_only_layers": [3],
            "use_sliding_window": True,
            "sliding_window": 40,
            "head_dim": 16,
        },
    ),
}

_root: tempfile.TemporaryDirectory[str] | None = None


@cache
def model_folder(name: str) -> Path:
    """Returns the saved folder of a variant; built once per process, deleted with it."""
    global _root
    if _root is None:
        _root = tempfile.TemporaryDirectory(prefix="millrace-tiny-")
    folder = Path(_root.name) / name
    variant = VARIANTS[name]
    config = getattr(transformers, variant.config_class)(**{**_COMMON, **variant.overrides})
    torch.manual_seed(len(name) * 1000 + sum(map(ord, name)))
    model = transformers.AutoModelForCausalLM.from_config(config)
    for parameter_name, parameter in model.named_parameters():
        if "norm" in parameter_name or parameter_name.endswith("bias"):
            with torch.no_grad():  # initialised to a constant, which would hide mistakes
                parameter.add_(torch.randn_like(parameter) * 0.2)
    limit = {} if variant.shard_bytes is None else {"max_shard_size": variant.shard_bytes}
    model.save_pretrained(folder, **limit)
    return folder


class Oracle:
    """`transformers` with eager attention."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, attn_implementation="eager"
        ).eval()
        self._greedy: dict[tuple[tuple[int, ...], int], list[int]] = {}  # tests ask again

    @torch.no_grad()
    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Returns float32 [L, vocab] of every position."""
        out = self.model(torch.tensor([list(token_ids)]))
        return out.logits[0].float()

    @torch.no_grad()
    def hidden(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Returns float32 [L, hidden_size] of every position, after the final norm."""
        out = self.model.base_model(torch.tensor([list(token_ids)]))
        return out.last_hidden_state[0].float()

    def greedy(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Returns `count` tokens after the prompt, end-of-sequence ids included."""
        asked = (tuple(token_ids), count)
        if asked not in self._greedy:
            [self._greedy[asked]] = self._generate(token_ids, count, width=1)
        return list(self._greedy[asked])

    def beams(self, token_ids: Sequence[int], width: int, count: int) -> list[list[int]]:
        """Returns the `width` likeliest answers of `count` tokens that a beam search finds."""
        return self._generate(token_ids, count, width)

    def logprob(self, token_ids: Sequence[int], answer: Sequence[int]) -> float:
        """Returns the log probability of an answer."""
        logits = self.logits([*token_ids, *answer])[len(token_ids) - 1 : -1]
        found = torch.log_softmax(logits, dim=-1)
        return found[range(len(answer)), list(answer)].sum().item()

    @torch.no_grad()
    def _generate(self, token_ids: Sequence[int], count: int, width: int) -> list[list[int]]:
        generated = self.model.generate(
            torch.tensor([list(token_ids)]),
            attention_mask=torch.ones(1, len(token_ids), dtype=torch.long),
            generation_config=transformers.GenerationConfig(
                max_new_tokens=count,
                min_new_tokens=None,
                num_beams=width,
                num_return_sequences=width,
                do_sample=False,
                eos_token_id=-1,
                pad_token_id=0,
            ),
        )
        return generated[:, len(token_ids) :].tolist()


@cache
def oracle(name: str) -> Oracle:
    """Returns the oracle of a variant in float32, loaded once per process."""
    return Oracle(model_folder(name))


def prompt(length: int, seed: int = 0) -> list[int]:
    """Returns random token ids; none is an end-of-sequence id."""
    generator = torch.Generator().manual_seed(seed * 100_003 + length)
    return torch.randint(8, VOCAB, (length,), generator=generator).tolist()
