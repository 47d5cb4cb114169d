"""The tables of a step, made on the host, that tell attention where rows and pages are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NOWHERE: Final = -1
"""A slot outside the pool: on a GPU the row's K/V is not written."""

Pages = Sequence[int] | npt.NDArray[np.int32]
"""Of one sequence, in token order."""


def slots_of(page_table: Tensor, rows: Tensor, positions: Tensor, page_tokens: int) -> Tensor:
    """Returns int64 [n]: the slot of each position's K/V, for a row of the page table each.

    In NumPy, which takes half of torch's time over a few numbers.
    """
    position: npt.NDArray[np.int64] = positions.numpy()
    page = position // page_tokens
    moved = page_table.numpy()[rows.numpy(), page] - page  # pages, from its place in order
    return torch.from_numpy(position + moved * page_tokens)


def page_table_of(pages: Sequence[Pages]) -> Tensor:
    """Returns int32 [sequences, most pages], padded with 0; attention does not read the padding."""
    table = torch.zeros(len(pages), max(map(len, pages)), dtype=torch.int32)
    for row, of_one in enumerate(pages):
        table[row, : len(of_one)] = torch.tensor(of_one, dtype=torch.int32)
    return table


def indptr_of(lengths: Sequence[int]) -> Tensor:
    """Returns int32 [sequences + 1]: the first row of each sequence, and the end."""
    return torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)


@cache
def one_each(sequences: int) -> Tensor:
    """Returns `indptr_of` a decode step."""
    return torch.arange(sequences + 1, dtype=torch.int32)
