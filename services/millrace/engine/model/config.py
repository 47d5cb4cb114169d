"""A model's shape, read from the config.json of a Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.core.errors import ModelError
from millrace.engine.model.families import ARCHITECTURES, Bias, Family, Window
from millrace.engine.model.rope_config import RopeConfig, parse_rope

#: Weight dtypes the engine computes in, by the names that configs use.
DTYPES = ("float32", "bfloat16")


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeConfig:
    """The mixture-of-experts MLPs. ``layers[i]`` says whether layer i has one."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalise: bool  # the chosen experts' weights are scaled to sum to one
    layers: tuple[bool, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The engine's settings of a model. Immutable.

    ``sliding_windows[i]`` is layer i's window in tokens, or None. ``dtype`` is one of `DTYPES`: the
    checkpoint's dtype, float16 read as bfloat16.
    """

    family: Family
    vocab_size: int
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_context_tokens: int
    norm_eps: float
    rope: RopeConfig
    sliding_windows: tuple[int | None, ...]
    tie_embeddings: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    moe: MoeConfig | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    def is_moe(self, layer: int) -> bool:
        return self.moe is not None and self.moe.layers[layer]

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Reads config.json and, when there is one, generation_config.json.

        Raises ModelError naming folder, file and field.
        """
        folder = Path(folder)
        if not folder.is_dir():
            raise ModelError(f"{folder}: no such model folder")
        config = read_json(folder / "config.json")
        generation_path = folder / "generation_config.json"
        generation = read_json(generation_path) if generation_path.is_file() else {}
        return parse_config(config, generation, where=str(folder / "config.json"))


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises ModelError when the file is missing, malformed or something else.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent}: {path.name} is missing") from error
    except (OSError, ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(f"{path}: not readable as JSON: {reason}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def parse_config(
    config: Mapping[str, Any], generation: Mapping[str, Any], *, where: str
) -> ModelConfig:
    """Builds a ModelConfig from the two parsed files. `where` begins every ModelError."""
    family = _family(config, where)
    if (quantization := config.get("quantization_config")) is not None:
        method = quantization.get("quant_method") if isinstance(quantization, Mapping) else None
        raise ModelError(f"{where}: quantized weights ({method}) are not supported")
    fields = _Fields(config, where)
    if (act := config.get("hidden_act", "silu")) not in ("silu", "swish"):
        raise ModelError(f"{where}: hidden_act {act!r} is not supported; silu is")
    layers = fields.count("num_hidden_layers")
    hidden, heads = fields.count("hidden_size"), fields.count("num_attention_heads")
    kv_heads = fields.count("num_key_value_heads", heads)
    head_dim = fields.count("head_dim", family.default_head_dim or hidden // heads)
    if heads % kv_heads:
        raise ModelError(f"{where}: {heads} attention heads can't share {kv_heads} KV heads")
    if head_dim % 2:
        raise ModelError(f"{where}: head_dim is {head_dim}; rotary positions need an even number")
    rope = parse_rope(config, where, default_theta=family.default_rope_theta)
    configured_bias = family.attention_bias is Bias.CONFIG and fields.flag("attention_bias")
    return ModelConfig(
        family=family,
        vocab_size=fields.count("vocab_size"),
        num_layers=layers,
        hidden_size=hidden,
        intermediate_size=fields.count("intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        max_context_tokens=_max_context(fields.count("max_position_embeddings"), rope),
        norm_eps=fields.positive("rms_norm_eps", family.default_norm_eps),
        rope=rope,
        sliding_windows=_sliding_windows(fields, family, layers),
        tie_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=configured_bias or family.attention_bias is Bias.QKV,
        o_bias=configured_bias,
        mlp_bias=family.mlp_bias and fields.flag("mlp_bias"),
        qk_norm=family.qk_norm,
        moe=_moe(fields, family, layers),
        eos_token_ids=_eos_token_ids(config, generation, where),
        bos_token_id=_optional_id(config.get("bos_token_id")),
        dtype=_dtype(config, where),
    )


class _Fields:
    """Typed access to a config.json with messages that name the field."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config = config
        self.where = where

    def count(self, name: str, default: int | None = None) -> int:
        """Returns a whole number of at least 1; a null counts as absent."""
        value = self.config.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ModelError(f"{self.where}: {name} is {value!r}; expected a whole number above 0")
        return value

    def positive(self, name: str, default: float) -> float:
        value = self.config.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ModelError(f"{self.where}: {name} is {value!r}; it must be a number above 0")
        return float(value)

    def flag(self, name: str) -> bool:
        """Returns true or false; absent and null are false."""
        value = self.config.get(name)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"{self.where}: {name} is {value!r}; it must be true or false")
        return bool(value)


def _family(config: Mapping[str, Any], where: str) -> Family:
    named = config.get("architectures")
    if isinstance(named, list) and named:
        family = ARCHITECTURES.get(str(named[0]))
        name = f"architecture {named[0]!r}"
    else:
        by_type = {family.name: family for family in ARCHITECTURES.values()}
        family = by_type.get(str(config.get("model_type")))
        name = f"model_type {config.get('model_type')!r}"
    if family is None:
        raise ModelError(f"{where}: {name} is not supported; {', '.join(ARCHITECTURES)} are")
    return family


def _max_context(max_positions: int, rope: RopeConfig) -> int:
    """Returns the tokens a sequence may have.

    Position interpolation and YaRN extend the trained context.
    """
    if rope.kind == "linear":
        return int(max_positions * rope.factor)
    if rope.kind == "yarn":
        return max(max_positions, int(rope.original_max_tokens * rope.factor))
    return max_positions


def _sliding_windows(fields: _Fields, family: Family, layers: int) -> tuple[int | None, ...]:
    nowhere: tuple[int | None, ...] = (None,) * layers
    if fields.config.get("sliding_window", family.default_window) is None:
        return nowhere
    if family.window is Window.NEVER:
        return nowhere
    if family.window is not Window.ALL and not fields.flag("use_sliding_window"):
        return nowhere
    window = fields.count("sliding_window", family.default_window)
    if family.window is not Window.BY_LAYER:
        return (window,) * layers
    return tuple(window if slides else None for slides in _sliding_layers(fields, layers))


def _sliding_layers(fields: _Fields, layers: int) -> list[bool]:
    types = fields.config.get("layer_types")
    if types is None:
        first = fields.config.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise ModelError(f"{fields.where}: max_window_layers is {first!r}; expected a count")
        return [layer >= first for layer in range(layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(t not in known for t in types):
        raise ModelError(
            f"{fields.where}: layer_types must name {' or '.join(known)} for each of the "
            f"{layers} layers"
        )
    return [kind == "sliding_attention" for kind in types]


def _moe(fields: _Fields, family: Family, layers: int) -> MoeConfig | None:
    names = family.experts
    if names is None:
        return None
    present = [name for name in names.count_fields if fields.config.get(name) is not None]
    experts = fields.count(present[0] if present else names.count_fields[0])
    chosen = fields.count("num_experts_per_tok")
    if chosen > experts:
        raise ModelError(f"{fields.where}: num_experts_per_tok is {chosen} of {experts} experts")
    if names.always_normalised:
        sparse = (True,) * layers
    else:
        step = fields.count("decoder_sparse_step", 1)
        dense = fields.config.get("mlp_only_layers") or []
        if not isinstance(dense, list):
            raise ModelError(f"{fields.where}: mlp_only_layers is {dense!r}; expected a list")
        sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    return MoeConfig(
        num_experts=experts,
        experts_per_token=chosen,
        intermediate_size=fields.count(names.size_field),
        normalise=names.always_normalised or fields.flag("norm_topk_prob"),
        layers=sparse,
    )


def _eos_token_ids(
    config: Mapping[str, Any], generation: Mapping[str, Any], where: str
) -> tuple[int, ...]:
    """Returns generation_config.json's ids when it has any, else config.json's; ascending."""
    value = generation.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    ids = value if isinstance(value, list) else [value]
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        raise ModelError(f"{where}: eos_token_id is {value!r}; expected an id or a list of ids")
    return tuple(sorted(set(ids)))


def _optional_id(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _dtype(config: Mapping[str, Any], where: str) -> str:
    named = config.get("dtype") or config.get("torch_dtype") or "float32"
    name = str(named).removeprefix("torch.")
    if name in DTYPES:
        return name
    if name in ("float16", "half"):
        return "bfloat16"
    raise ModelError(f"{where}: dtype {named!r} is not supported; {', '.join(DTYPES)} are")
