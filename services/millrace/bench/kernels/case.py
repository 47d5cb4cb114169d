"""A case of `millrace bench kernels`: one kernel at one shape, torch's alternative, and their
data.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import torch
from torch import Tensor

from millrace.core.arithmetic import ceil_div

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16}
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The shapes: attention and rows as in a model of 100M parameters, linears also as in an 8B."""

    num_q_heads: int = 12
    num_kv_heads: int = 4
    head_dim: int = 64
    page_tokens: int = 16
    prefill_rows: Sequence[int] = (512, 2048)
    histories: Sequence[int] = (0, 8192)
    batches: Sequence[int] = (1, 8)
    contexts: Sequence[int] = (512, 2048, 8192, 65536)
    ring_tokens: int = 2048
    rows: Sequence[int] = (8, 2048)
    hidden: int = 768
    intermediate: int = 2048
    linear_rows: Sequence[int] = (1, 2, 4, 8, 32, 512, 2048)
    #: (in, out): gate_up of the small model, and a quarter of an 8B's.
    linear_shapes: Sequence[tuple[int, int]] = ((768, 4096), (4096, 7168))
    fused_rows: Sequence[int] = (1, 8, 512)
    experts: int = 8
    experts_per_token: int = 2
    expert_width: int = 1024
    vocab: int = 128_256
    cold_bytes: int = 128 * 2**20

    @property
    def scale(self) -> float:
        """Returns the scale of attention's scores."""
        return float(self.head_dim**-0.5)


@dataclass(frozen=True, slots=True)
class Sides:
    """The two timed calls. Their first results must agree."""

    ours: Callable[[], Tensor]
    other: Callable[[], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One line. `flops` and `moved_bytes`: the least work of a call; `against`: the alternative."""

    kernel: str
    shape: str
    dtype: str
    flops: float
    moved_bytes: float
    make: Callable[[], Sides]
    against: str = "torch"


def random(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns normal values, repeated after some 260,000: drawing all of them takes longer than
    timing.
    """
    count = math.prod(shape)
    pattern = torch.randn(min(count, 262_147)).to(dtype)
    return pattern.repeat(ceil_div(count, max(1, pattern.numel())))[:count].view(tuple(shape))


def copies(tensor: Tensor, sizes: Sizes) -> list[Tensor]:
    """Returns the tensor and as many copies as exceed the caches."""
    count = max(1, math.ceil(sizes.cold_bytes / max(1, tensor.nbytes)))
    return [tensor, *(tensor.clone() for _ in range(count - 1))]


def turns(items: Sequence[Item]) -> Iterator[Item]:
    """Yields the items in a cycle."""
    return itertools.cycle(items)
