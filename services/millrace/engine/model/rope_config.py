"""The rotary embedding that a model's config.json asks for. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.core.errors import ModelError

ROPE_KINDS = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """One model's rotary embedding. Fields past ``factor`` are read only by the kinds named."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_tokens: int = 0  # llama3, yarn: the context the model was first trained on
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn: rotations above which a dimension is left alone
    beta_slow: float = 1.0  # yarn: rotations below which a dimension is interpolated whole
    truncate: bool = True  # yarn: round the ramp's ends to whole dimensions
    attention_factor: float = 1.0  # yarn: multiplies cos and sin


def parse_rope(config: Mapping[str, Any], where: str, *, default_theta: float) -> RopeConfig:
    """Reads `rope_parameters`, or `rope_theta` with `rope_scaling`, of a config.json.

    `where` begins every message. Raises ModelError for an unknown kind, partial rotation,
    parameters that differ by layer, and missing or senseless numbers.
    """
    raw = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(raw, Mapping):
        raise ModelError(f"{where}: rope_parameters or rope_scaling must be a JSON object")
    if any(isinstance(value, Mapping) for value in raw.values()):
        raise ModelError(f"{where}: rope parameters that differ by layer type are not supported")
    kind = raw.get("rope_type") or raw.get("type") or "default"
    if kind not in ROPE_KINDS:
        known = ", ".join(ROPE_KINDS)
        raise ModelError(f"{where}: rope type {kind!r} is not supported; {known} are")
    numbers = _Numbers([raw, config, {"rope_theta": default_theta}], where)
    if (partial := numbers.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ModelError(f"{where}: partial_rotary_factor {partial} is not supported; 1.0 is")
    theta = numbers.get("rope_theta")
    if kind == "default":
        return RopeConfig(theta=theta)
    if kind == "linear":
        return RopeConfig(kind=kind, theta=theta, factor=numbers.get("factor"))
    if kind == "llama3":
        return RopeConfig(
            kind=kind,
            theta=theta,
            factor=numbers.get("factor"),
            original_max_tokens=_original_max_tokens(numbers),
            low_freq_factor=(low := numbers.get("low_freq_factor")),
            high_freq_factor=numbers.get("high_freq_factor", above=low),
        )
    original = _original_max_tokens(numbers)
    factor = numbers.get("factor", numbers.get("max_position_embeddings", original) / original)
    return RopeConfig(
        kind=kind,
        theta=theta,
        factor=factor,
        original_max_tokens=original,
        beta_fast=numbers.get("beta_fast", 32.0),
        beta_slow=numbers.get("beta_slow", 1.0),
        truncate=bool(raw.get("truncate", True)),
        attention_factor=_yarn_attention_factor(numbers, factor),
    )


class _Numbers:
    """Reads numbers above a bound from the first JSON object that has them; messages name the
    field.
    """

    def __init__(self, sources: list[Mapping[str, Any]], where: str) -> None:
        self._sources = sources
        self._where = where

    def get(self, name: str, default: float | None = None, *, above: float = 0.0) -> float:
        """Returns a number.

        A null counts as absent. Raises ModelError when absent and without a default.
        """
        found = [source[name] for source in self._sources if source.get(name) is not None]
        value = found[0] if found else default
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > above:
            raise ModelError(
                f"{self._where}: rope parameter {name} is {value!r}; "
                f"it must be a number above {above:g}"
            )
        return float(value)

    def has(self, name: str) -> bool:
        return any(source.get(name) is not None for source in self._sources)


def _original_max_tokens(numbers: _Numbers) -> int:
    name = "original_max_position_embeddings"
    return int(numbers.get(name if numbers.has(name) else "max_position_embeddings"))


def _yarn_attention_factor(numbers: _Numbers, factor: float) -> float:
    """YaRN section 3.4, with the two-sided form (mscale) that some checkpoints give instead."""
    if numbers.has("attention_factor"):
        return numbers.get("attention_factor")

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if numbers.has("mscale") and numbers.has("mscale_all_dim"):
        return scale(numbers.get("mscale")) / scale(numbers.get("mscale_all_dim"))
    return scale(1.0)
