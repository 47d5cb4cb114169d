from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from millrace.core.errors import ModelError
from millrace.engine.model.config import ModelConfig, parse_config
from support.tiny_models import VARIANTS, model_folder, oracle

BASE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1000,
    "rms_norm_eps": 1e-5,
}
MOE = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def parse(architecture: str = "Llama", generation: Any = None, **overrides: Any) -> ModelConfig:
    config = {**BASE, "architectures": [f"{architecture}ForCausalLM"], **overrides}
    return parse_config(config, generation or {}, where="m/config.json")


@pytest.mark.parametrize("name", list(VARIANTS))
def test_what_transformers_saves_reads_back_as_it_understands_it(name: str) -> None:
    config, theirs = ModelConfig.from_folder(model_folder(name)), oracle(name).model.config
    assert config.num_layers == theirs.num_hidden_layers
    assert config.num_kv_heads == theirs.num_key_value_heads
    attention = oracle(name).model.model.layers[0].self_attn
    assert config.head_dim == attention.head_dim
    assert config.qkv_bias == (attention.q_proj.bias is not None)
    assert config.o_bias == (attention.o_proj.bias is not None)
    assert config.tie_embeddings == theirs.tie_word_embeddings
    eos = theirs.eos_token_id
    assert config.eos_token_ids == tuple(eos if isinstance(eos, list) else [eos])


def test_null_head_dim_and_absent_kv_heads_follow_from_the_others() -> None:
    config = parse(head_dim=None, num_key_value_heads=None)
    assert (config.head_dim, config.num_kv_heads) == (8, 8)
    assert parse("Qwen3").head_dim == 128
    assert parse(head_dim=32).q_size == 256


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float32"}, "float32"),
        ({"torch_dtype": "float16"}, "bfloat16"),
        ({}, "float32"),
    ],
)
def test_dtype_by_either_name(fields: dict[str, str], dtype: str) -> None:
    assert parse(**fields).dtype == dtype


@pytest.mark.parametrize(
    ("architecture", "fields", "windows"),
    [
        ("Llama", {"sliding_window": 9}, (None,) * 4),
        ("Mistral", {"sliding_window": 9}, (9,) * 4),
        ("Mistral", {"sliding_window": None}, (None,) * 4),
        ("Mistral", {}, (4096,) * 4),
        ("Qwen2", {"sliding_window": 9}, (None,) * 4),
        ("Qwen2", {"sliding_window": 9, "use_sliding_window": True}, (None,) * 4),
        (
            "Qwen2",
            {"sliding_window": 9, "use_sliding_window": True, "max_window_layers": 3},
            (None, None, None, 9),
        ),
        (
            "Qwen3",
            {
                "sliding_window": 9,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (9, None, 9, None),
        ),
        ("Qwen3Moe", {**MOE, "sliding_window": 9, "use_sliding_window": True}, (9,) * 4),
        ("Qwen3Moe", {**MOE, "sliding_window": 9}, (None,) * 4),
    ],
)
def test_sliding_windows_a_layer(
    architecture: str, fields: dict[str, Any], windows: tuple[int | None, ...]
) -> None:
    assert parse(architecture, **fields).sliding_windows == windows


@pytest.mark.parametrize(
    ("fields", "layers"),
    [
        ({}, (True,) * 4),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"mlp_only_layers": [0, 3]}, (False, True, True, False)),
        ({"mlp_only_layers": None}, (True,) * 4),
    ],
)
def test_which_layers_of_qwen3_moe_have_experts(
    fields: dict[str, Any], layers: tuple[bool, ...]
) -> None:
    moe = parse("Qwen3Moe", **MOE, **fields).moe
    assert moe is not None and moe.layers == layers and not moe.normalise


def test_context_of_scaled_positions() -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert parse(rope_scaling={"rope_type": "linear", "factor": 2.5}).max_context_tokens == 2500
    assert parse(rope_scaling=yarn).max_context_tokens == 4000
    before = {**yarn, "original_max_position_embeddings": 250}
    assert parse(rope_scaling=before).max_context_tokens == 1000


@pytest.mark.parametrize(
    ("config_eos", "generation_eos", "expected"),
    [(5, None, (5,)), ([9, 5], None, (5, 9)), (5, [8, 7], (7, 8)), (None, None, ()), (5, 6, (6,))],
)
def test_eos_ids_of_generation_config_win(
    config_eos: Any, generation_eos: Any, expected: tuple[int, ...]
) -> None:
    config = parse(eos_token_id=config_eos, generation={"eos_token_id": generation_eos})
    assert config.eos_token_ids == expected


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "architecture 'GPT2LMHeadModel' is not supported"),
        ({"architectures": None, "model_type": "bert"}, "model_type 'bert' is not supported"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quantized weights \(awq\)"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"hidden_size": None}, "hidden_size is None; expected a whole number above 0"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({"vocab_size": 1.5}, "vocab_size is 1.5"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"num_key_value_heads": 3}, "8 attention heads can't share 3 KV heads"),
        ({"head_dim": 7}, "head_dim is 7; rotary positions need an even number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings is 1; it must be true or false"),
        ({"dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn' is not supported"),
        ({"eos_token_id": "</s>"}, "eos_token_id is '</s>'"),
        ({"rope_scaling": {"rope_type": "su"}}, "rope type 'su' is not supported"),
        (
            {"architectures": ["Qwen3MoeForCausalLM"], **MOE, "num_experts_per_tok": 9},
            "num_experts_per_tok is 9 of 8 experts",
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "use_sliding_window": True,
                "layer_types": ["full_attention"],
            },
            "layer_types must name full_attention or sliding_attention for each of the 4 layers",
        ),
    ],
)
def test_a_config_that_is_not_served_is_refused_in_one_line(
    fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        parse_config({**BASE, **fields}, {}, where="m/config.json")
    assert str(caught.value).startswith("m/config.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "config.json is missing"),
        ("{", "config.json: not readable as JSON"),
        ("[" * 100_000, "config.json: not readable as JSON"),
        ("[1]", "config.json: expected a JSON object, found list"),
        (b"\xff\xfe", "config.json: not readable as JSON"),
        ("{}", "model_type None is not supported"),
    ],
)
def test_a_folder_without_a_readable_config_is_refused(
    tmp_path: Path, content: str | bytes | None, message: str
) -> None:
    if content is not None:
        data = content.encode() if isinstance(content, str) else content
        (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(ModelError, match=message) as caught:
        ModelConfig.from_folder(tmp_path)
    assert str(tmp_path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_folder_and_a_broken_generation_config_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nowhere: no such model folder"):
        ModelConfig.from_folder(tmp_path / "nowhere")
    (tmp_path / "config.json").write_text(json.dumps(BASE))
    (tmp_path / "generation_config.json").write_text("not json")
    with pytest.raises(ModelError, match=r"generation_config\.json: not readable as JSON"):
        ModelConfig.from_folder(tmp_path)
