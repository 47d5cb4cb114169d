"""An exchange's memory as tensors: the places of a piece's q, K/V and partial results.

Shape letters: r rows, m new rows, h q heads, k kv heads, d head_dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.core.kv.kvp_pass import ExchangeShape
from millrace.engine.kv.host_memory import host_zeros


def exchange_memory(nbytes: int) -> Tensor:
    """Allocates uint8 [nbytes] on the host, for `KvpExchange` or `KvpServer`; pages are taken at
    first use.
    """
    return host_zeros((nbytes,), torch.uint8)


@dataclass(frozen=True, slots=True, eq=False)
class PieceViews:
    q: Tensor  # [r, h, d]
    kv: Tensor  # [m, 2, k, d]
    out: Tensor  # float32 [r, h, d]
    lse: Tensor  # float32 [r, h]

    @staticmethod
    def of(
        memory: Tensor,
        shape: ExchangeShape,
        dtype: torch.dtype,
        at: tuple[int, int],
        rows: int,
        new_rows: int,
    ) -> PieceViews:
        """Builds the views.

        memory: uint8, laid out by an `ExchangeShape`; ``at``: the pair's offsets.
        """
        heads, kv_heads, head_dim = shape.num_q_heads, shape.num_kv_heads, shape.head_dim
        q_at = at[0] + shape.queries_at
        kv_at = q_at + shape.sent_bytes(rows, 0)
        lse_at = at[1] + rows * heads * head_dim * 4
        ends = (q_at + shape.sent_bytes(rows, new_rows), at[1] + shape.returned_bytes(rows))
        return PieceViews(
            memory[q_at:kv_at].view(dtype).view(rows, heads, head_dim),
            memory[kv_at : ends[0]].view(dtype).view(new_rows, 2, kv_heads, head_dim),
            memory[at[1] : lse_at].view(torch.float32).view(rows, heads, head_dim),
            memory[lse_at : ends[1]].view(torch.float32).view(rows, heads),
        )


class NewRows:
    """The places of m tokens' K/V in pages. The case m = 1, the usual one in decode, is fast."""

    def __init__(self, pages: Tensor, offsets: Tensor) -> None:
        """int64 [m] each; offsets: within the page."""
        self._at = pages, offsets
        self._only = (int(pages[0]), int(offsets[0])) if len(pages) == 1 else None

    def read(self, kv_layers: Tensor, kv: Tensor) -> None:
        """Copies kv_layers [pools, pages, 2, k, page_tokens, d], whose heads are the pools' in
        order, to kv [m, 2, pools * k, d]."""
        if self._only is not None:
            page, offset = self._only
            _by_pool(kv, len(kv_layers))[0].copy_(kv_layers[:, page, :, :, offset])
            return
        pages, offsets = self._at
        _by_pool(kv, len(kv_layers)).copy_(kv_layers[:, pages, :, :, offsets])

    def write(self, kv_layers: Tensor, kv: Tensor) -> None:
        """Copies kv to kv_layers, the opposite of `read`."""
        if self._only is not None:
            page, offset = self._only
            kv_layers[:, page, :, :, offset].copy_(_by_pool(kv, len(kv_layers))[0])
            return
        pages, offsets = self._at
        kv_layers[:, pages, :, :, offsets] = _by_pool(kv, len(kv_layers)).to(kv_layers.device)


def _by_pool(kv: Tensor, pools: int) -> Tensor:
    """Returns kv [m, 2, pools * k, d] as [m, pools, 2, k, d]."""
    rows, planes, _, head_dim = kv.shape
    return kv.view(rows, planes, pools, -1, head_dim).transpose(1, 2)
