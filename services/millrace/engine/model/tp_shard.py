"""The share of a model that a rank of a tensor-parallel group holds (Megatron-LM section 3).

qkv_proj and gate_up_proj are split by output rows (heads; intermediate). o_proj, down_proj and the
experts' down projection are split by the columns that read these rows, so that one all-reduce after
o_proj and one after the MLP complete the sums. Experts are split in width: every rank has a slice
of all of them. lm_head is split by vocabulary. Norms, the router and the embedding are on every
rank. A bias that belongs after an all-reduce is at rank 0 alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from millrace.core.arithmetic import ceil_div
from millrace.core.errors import ConfigError
from millrace.engine.model.config import ModelConfig
from millrace.engine.model.weights.fused import WeightSpec

_Span = tuple[int, int]

_SPLIT_ROWS = ("gate_up", "gate_up_bias", "experts_gate_up")
_SPLIT_COLUMNS = ("o", "down", "experts_down")
_AFTER_REDUCE = ("o_bias", "down_bias")


@dataclass(frozen=True, slots=True)
class KvHeads:
    """Heads ``[start, start + count)`` of the model's `total`, as in `KvLayout`."""

    start: int
    count: int
    total: int


@dataclass(frozen=True, slots=True)
class TpShard:
    """Rank `rank` of `size`."""

    rank: int
    size: int

    def check(self, config: ModelConfig) -> None:
        """Raises ConfigError when the model can't be split by `size`; names the field and values.

        With more ranks than KV heads, each head is held by ``size / num_kv_heads`` of them.
        """
        few, many = sorted((self.size, config.num_kv_heads))
        if many % few:
            raise self._refusal("num_key_value_heads", config.num_kv_heads, "nor is its multiple")
        if config.num_heads % self.size:
            raise self._refusal("num_attention_heads", config.num_heads)
        is_dense = config.moe is None or not all(config.moe.layers)
        if is_dense and config.intermediate_size % self.size:
            raise self._refusal("intermediate_size", config.intermediate_size)
        if config.moe is not None and config.moe.intermediate_size % self.size:
            raise self._refusal("an expert's width", config.moe.intermediate_size)

    def kv_heads(self, total: int) -> KvHeads:
        """Returns the rank's heads, of a model's `total`."""
        return KvHeads(self.rank * total // self.size, max(total // self.size, 1), total)

    def config(self, config: ModelConfig) -> ModelConfig:
        """Returns the rank's config: its heads and widths instead of the whole model's."""
        moe = config.moe
        if moe is not None:
            moe = replace(moe, intermediate_size=moe.intermediate_size // self.size)
        return replace(
            config,
            num_heads=config.num_heads // self.size,
            num_kv_heads=self.kv_heads(config.num_kv_heads).count,
            intermediate_size=config.intermediate_size // self.size,
            moe=moe,
        )

    def vocabulary(self, vocab_size: int) -> _Span:
        """Returns [start, stop) of the rank's rows of lm_head; the last ranks may have fewer."""
        rows = ceil_div(vocab_size, self.size)
        return min(self.rank * rows, vocab_size), min((self.rank + 1) * rows, vocab_size)

    def piece(self, config: ModelConfig, name: str, spec: WeightSpec) -> WeightSpec | None:
        """Returns the rank's piece of a weight, by its field of `LayerWeights` or `ModelWeights`.

        `config` is the whole model's. None: another rank has all of it.
        """
        if self.size == 1:
            return spec
        if name in _AFTER_REDUCE:
            return spec if self.rank == 0 else None
        if name in ("qkv", "qkv_bias"):
            kv, head_dim = self.kv_heads(config.num_kv_heads), config.head_dim
            k_or_v = (kv.start * head_dim, (kv.start + kv.count) * head_dim)
            return _rows(spec, [self._share(config.q_size), k_or_v, k_or_v])
        if name in _SPLIT_ROWS:
            return _rows(spec, [self._share(part.shape[0]) for part in spec.parts])
        if name in _SPLIT_COLUMNS:
            return _columns(spec, self._share(spec.shape[-1]))
        if name == "lm_head":
            return _rows(spec, [self.vocabulary(config.vocab_size)])
        return spec

    def _share(self, total: int) -> _Span:
        width = total // self.size
        return self.rank * width, (self.rank + 1) * width

    def _refusal(self, field: str, value: int, but: str = "") -> ConfigError:
        return ConfigError(
            f"tensor parallelism of {self.size} does not divide {field}, which is {value}"
            + (f", {but}" if but else "")
        )


WHOLE = TpShard(0, 1)


def _rows(spec: WeightSpec, spans: Sequence[_Span]) -> WeightSpec:
    """Returns rows [start, stop) of every part, stacked again where the parts were stacked."""
    parts = []
    filled: Counter[tuple[int | slice, ...]] = Counter()  # rows so far of a stack
    block: tuple[int | slice, ...] = ()
    for part, (start, stop) in zip(spec.parts, spans, strict=True):
        block = part.index[:-1]
        rows = slice(filled[block], filled[block] + stop - start)
        parts.append(replace(part, index=(*block, rows), source=(slice(start, stop),)))
        filled[block] = rows.stop
    axis = len(block)
    shape = (*spec.shape[:axis], filled[block], *spec.shape[axis + 1 :])
    return replace(spec, shape=shape, parts=tuple(parts))


def _columns(spec: WeightSpec, span: _Span) -> WeightSpec:
    """Returns columns [start, stop) of every part."""
    start, stop = span
    source = (slice(None), slice(start, stop))
    parts = tuple(replace(part, source=source) for part in spec.parts)
    return replace(spec, shape=(*spec.shape[:-1], stop - start), parts=parts)
