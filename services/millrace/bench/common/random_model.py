"""Makes a random-weight Llama as a Hugging Face folder, for benchmarks without a real model."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

_STANDARD_DEVIATION = 0.02


def write_random_model(folder: Path, config: Mapping[str, Any]) -> Path:
    """Writes weights and a tokenizer to a new folder `random-llama` in `folder`; returns it."""
    folder = folder / "random-llama"
    folder.mkdir()
    write_random_llama(folder, config)
    write_word_tokenizer(folder, config["vocab_size"])
    return folder


def write_random_llama(folder: Path, config: Mapping[str, Any], dtype: str = "float32") -> int:
    """Writes config.json and model.safetensors to `folder`; returns the number of parameters.

    config: as `models.LLAMA_100M`. Matrices ~ N(0, 0.02), norms 1; the same weights in every run.
    """
    generator = torch.Generator().manual_seed(0)
    weights = {}
    for name, shape in _weights(config):
        weight = torch.ones(shape)
        if len(shape) > 1:
            weight.normal_(std=_STANDARD_DEVIATION, generator=generator)
        weights[name] = weight.to(getattr(torch, dtype))
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    document = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "dtype": dtype,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(document))
    return sum(weight.numel() for weight in weights.values())


def write_word_tokenizer(folder: Path, vocab_size: int) -> None:
    """Writes a tokenizer.json in which token i is the word " w<i>".

    Every token is one word, so a client can count tokens by counting words.
    """
    tokenizer = Tokenizer(models.BPE({f"\u0120w{i}": i for i in range(vocab_size)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text("{}")


def _weights(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    head_dim = hidden // config["num_attention_heads"]
    kv = config["num_key_value_heads"] * head_dim
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        yield f"{layer}.input_layernorm.weight", (hidden,)
        yield f"{layer}.self_attn.q_proj.weight", (hidden, hidden)
        yield f"{layer}.self_attn.k_proj.weight", (kv, hidden)
        yield f"{layer}.self_attn.v_proj.weight", (kv, hidden)
        yield f"{layer}.self_attn.o_proj.weight", (hidden, hidden)
        yield f"{layer}.post_attention_layernorm.weight", (hidden,)
        yield f"{layer}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.up_proj.weight", (inner, hidden)
        yield f"{layer}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)
