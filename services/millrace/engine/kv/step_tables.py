"""The tables of a step that tell attention where rows and pages are, made on the host."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

Pages = Sequence[int] | npt.NDArray[np.int32]
"""Of one sequence, in token order."""


def slots_of(page_table: Tensor, rows: Tensor, positions: Tensor, page_tokens: int) -> Tensor:
    """int64 [n]: where the K/V of each position of a row of the page table lies in the pool.

    In NumPy, which takes half of torch's time over a few numbers.
    """
    position: npt.NDArray[np.int64] = positions.numpy()
    page = position // page_tokens
    moved = page_table.numpy()[rows.numpy(), page] - page  # pages, from its place in order
    return torch.from_numpy(position + moved * page_tokens)


def page_table_of(pages: Sequence[Pages]) -> Tensor:
    """int32 [sequences, most pages], padded with 0, which nobody reads."""
    table = torch.zeros(len(pages), max(map(len, pages)), dtype=torch.int32)
    for row, of_one in enumerate(pages):
        table[row, : len(of_one)] = torch.tensor(of_one, dtype=torch.int32)
    return table


def indptr_of(lengths: Sequence[int]) -> Tensor:
    """int32 [sequences + 1]: the first row of each, and the end."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@cache
def one_each(sequences: int) -> Tensor:
    """`indptr_of` a decode step."""
    return torch.arange(sequences + 1, dtype=torch.int32)
