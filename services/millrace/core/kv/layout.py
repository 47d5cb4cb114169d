"""The layout of an instance's KV pools in memory. Engine and transfer agree through this and
nothing else.

A pool is one contiguous allocation of shape ``[num_layers, num_pages, 2, head_count, page_tokens,
head_dim]``: K is plane 0 and V plane 1 of a page, and a head's rows of a page are contiguous (HND),
so that heads can be split at any boundary between sender and receiver. A tensor-parallel instance
has one pool per rank. Its offsets count through the pools of all ranks, in the order of the ranks:
rank r's pool begins at ``r * part_bytes``, whether the pools lie in one allocation or each in the
memory of its own rank (`millrace.transfer.transport.joined`). So one transfer names all ranks.

Stages of a pipeline change no offset. Where they have pools of their own, the layers of a rank's
pool lie in the memory of several processes, and the layers of the first stage come first.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.errors import ConfigError
from millrace.core.kv.pages import pages_for

#: Bytes of one element of every dtype a pool may hold.
ELEMENT_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

_COUNTS = (
    *("num_layers", "num_kv_heads", "head_dim", "page_tokens", "head_count", "num_pages"),
    *("parts", "copies", "stages"),
)


def stage_layers(total: int, index: int, count: int) -> range:
    """Returns the layers of stage `index` of `count`, of `total` layers in all.

    Stages differ by one layer at most. The earlier stages have fewer, since the first computes
    embedding and logits.
    """
    return range(index * total // count, (index + 1) * total // count)


@dataclass(frozen=True, slots=True)
class MemberPool:
    """The pool of one process of an instance, and where it lies among the pools of all: the bytes
    ``[start, start + nbytes)``. `name`: of the process among the others."""

    name: str
    rank: int
    stage: int
    start: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """A KV pool of one rank, or the pools of all ranks of an instance.

    ``num_kv_heads`` counts the whole model's heads; the pools hold ``[head_start, head_start +
    head_count)``, in ``parts`` parts of equally many heads. With more ranks than KV heads,
    ``copies`` neighbouring ranks hold the same part, each in a pool of its own. Of the model's
    ``model_layers`` it holds ``[layer_start, layer_start + num_layers)``: all layers, except at a
    stage of a pipeline. Layer numbers always count from the model's first layer; ``model_layers`` 0
    stands for ``num_layers`` and is replaced by it. ``model_hash`` names the weights and, after an
    ``@``, the revision of the model that they serve as, if it has one: KV of different hashes must
    never mix. ``stages``: the processes that share a rank's layers, each with the pool of its own
    layers (`stage_layers`); 1 where one memory has all layers, in however many stages.
    """

    model_hash: str
    dtype: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    page_tokens: int
    head_start: int
    head_count: int
    num_pages: int
    parts: int = 1
    layer_start: int = 0
    model_layers: int = 0
    copies: int = 1
    stages: int = 1

    def __post_init__(self) -> None:
        if not self.model_layers:
            object.__setattr__(self, "model_layers", self.num_layers)
        self.validate()

    def validate(self) -> None:
        """Raises ConfigError that names the field, its value and its range."""
        if self.dtype not in ELEMENT_BYTES:
            raise ConfigError(
                f"kv_layout.dtype is {self.dtype!r}; it must be one of {', '.join(ELEMENT_BYTES)}"
            )
        for name in _COUNTS:
            if (value := getattr(self, name)) < 1:
                raise ConfigError(f"kv_layout.{name} is {value!r}; it must be at least 1")
        if self.layer_start < 0 or self.layer_end > self.model_layers:
            raise ConfigError(
                f"kv_layout.layer_start..layer_end is {self.layer_start}..{self.layer_end}; it "
                f"must lie within the model's {self.model_layers} layers"
            )
        if self.head_start < 0 or self.head_end > self.num_kv_heads:
            raise ConfigError(
                f"kv_layout.head_start..head_end is {self.head_start}..{self.head_end}; it must "
                f"lie within the model's {self.num_kv_heads} heads"
            )
        if self.head_count % self.parts:
            raise ConfigError(
                f"kv_layout.parts is {self.parts}; it must divide the {self.head_count} heads"
            )
        if self.stages > self.num_layers:
            raise ConfigError(
                f"kv_layout.stages is {self.stages}; it must be at most num_layers, "
                f"{self.num_layers}"
            )

    @property
    def head_end(self) -> int:
        """One past the last head."""
        return self.head_start + self.head_count

    @property
    def layer_end(self) -> int:
        """One past the last layer of this pool."""
        return self.layer_start + self.num_layers

    @property
    def layers(self) -> range:
        """Returns the model's layers that are in this pool."""
        return range(self.layer_start, self.layer_end)

    @property
    def element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def part_heads(self) -> int:
        """Returns the heads of each part."""
        return self.head_count // self.parts

    @property
    def ranks(self) -> int:
        """Returns the number of ranks, each with a pool of one part."""
        return self.parts * self.copies

    def heads_of(self, rank: int) -> range:
        """Returns the model's heads in the pool of `rank`."""
        first = self.head_start + rank // self.copies * self.part_heads
        return range(first, first + self.part_heads)

    @property
    def row_bytes(self) -> int:
        """Returns the bytes of one token of one head of one plane (K or V)."""
        return self.head_dim * self.element_bytes

    @property
    def page_bytes(self) -> int:
        """Returns the bytes of one page of one layer, K and V of all heads of a part."""
        return 2 * self.part_heads * self.page_tokens * self.row_bytes

    @property
    def layer_bytes(self) -> int:
        """Returns the bytes of one layer of a part."""
        return self.num_pages * self.page_bytes

    def layer_offset(self, layer: int) -> int:
        """The bytes from a part's beginning to the model's `layer`, which must be in this pool."""
        return (layer - self.layer_start) * self.layer_bytes

    @property
    def part_bytes(self) -> int:
        """Returns the bytes of one rank's pool: from one rank to the next."""
        return self.num_layers * self.layer_bytes

    @property
    def pool_bytes(self) -> int:
        """Returns the bytes of the pools of all ranks."""
        return self.ranks * self.part_bytes

    @property
    def page_of_all_bytes(self) -> int:
        """Returns the bytes of one page in the pools of all ranks, with all layers."""
        return self.ranks * self.num_layers * self.page_bytes

    @property
    def member_pools(self) -> tuple[MemberPool, ...]:
        """Returns the pools of all ranks and stages, in the order in which they lie."""
        found = []
        for rank in range(self.ranks):
            for stage in range(self.stages):
                held = stage_layers(self.num_layers, stage, self.stages)
                start = rank * self.part_bytes + held.start * self.layer_bytes
                name = _member_name(self, rank, stage)
                found.append(MemberPool(name, rank, stage, start, len(held) * self.layer_bytes))
        return tuple(found)

    @property
    def buffer_layers(self) -> int:
        """Returns the layers of a page that a ring's buffers may use for each layer: all in one
        memory, or as many as every stage has."""
        return self.num_layers // self.stages

    def buffer_offset(self, layer: int) -> int:
        """The bytes from a part's beginning to the memory of the stage that has the model's
        `layer`, in whose first `buffer_layers` the layer's blocks of a ring arrive."""
        layer -= self.layer_start
        held = (stage_layers(self.num_layers, stage, self.stages) for stage in range(self.stages))
        return next(layers.start for layers in held if layer in layers) * self.layer_bytes

    @property
    def bytes_per_token(self) -> int:
        """Returns the bytes of one token over all layers, K and V of all heads, each once."""
        return self.num_layers * 2 * self.head_count * self.row_bytes

    def pages_for(self, tokens: int) -> int:
        """Returns the pages that hold `tokens` tokens."""
        return pages_for(tokens, self.page_tokens)


def _member_name(layout: KvLayout, rank: int, stage: int) -> str:
    if layout.stages == 1:
        return f"rank {rank}"
    return f"stage {stage}" if layout.ranks == 1 else f"rank {rank} of stage {stage}"
