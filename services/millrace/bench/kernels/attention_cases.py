"""Cases of attention: torch gets K/V already gathered from the pages, and ready masks.

Shape letters: n rows, h q heads, k kv heads, d head_dim, b sequences, p positions of K/V.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional

from millrace.bench.kernels.case import DTYPES, Case, Sides, Sizes, copies, random, turns
from millrace.core.arithmetic import ceil_div
from millrace_kernels import api
from millrace_kernels.reference import gather_kv


class PagedKv:
    """`batch` sequences of `kv_len` tokens, with their pages scattered over a pool of this size."""

    def __init__(self, sizes: Sizes, dtype: str, *, batch: int, q_len: int, kv_len: int) -> None:
        self._sizes, self._kv_len = sizes, kv_len
        pages = ceil_div(kv_len, sizes.page_tokens)
        self.table = torch.randperm(batch * pages).int().view(batch, pages)
        self._dtype = DTYPES[dtype]
        self.q_nhd = random((batch * q_len, sizes.num_q_heads, sizes.head_dim), self._dtype)
        self._q_len = q_len

    def layer(self) -> Tensor:
        """Makes a layer's K/V pool."""
        s = self._sizes
        shape = (self.table.numel(), 2, s.num_kv_heads, s.page_tokens, s.head_dim)
        return random(shape, self._dtype)

    def plan(self, positions: Tensor | None = None) -> api.AttentionPlan:
        """Makes the plan, with rows and slots of each sequence at `positions`, int32 [p], if
        given.
        """
        s, batch = self._sizes, len(self.table)
        return api.plan_attention(
            q_indptr=torch.arange(batch + 1, dtype=torch.int32) * self._q_len,
            kv_lens=torch.full((batch,), self._kv_len, dtype=torch.int32),
            page_table=self.table,
            page_tokens=s.page_tokens,
            num_q_heads=s.num_q_heads,
            num_kv_heads=s.num_kv_heads,
            head_dim=s.head_dim,
            dtype=self._dtype,
            device="cpu",
            q_positions=positions,
            kv_positions=positions,
        )

    def gathered(self, layer: Tensor) -> tuple[Tensor, Tensor]:
        """Returns K and V as contiguous [b, k, p, d]."""
        pairs = [gather_kv(layer, pages, self._kv_len) for pages in self.table]
        k_bkpd, v_bkpd = (torch.stack(side) for side in zip(*pairs, strict=True))
        return k_bkpd, v_bkpd

    def case(
        self, kernel: str, shape: str, dtype: str, pairs: float, make: Callable[[], Sides]
    ) -> Case:
        """`pairs`: the number of (row, visible position) pairs, over all sequences."""
        s = self._sizes
        kv_bytes = 2 * len(self.table) * self._kv_len * s.num_kv_heads * s.head_dim
        return Case(
            kernel=kernel,
            shape=shape,
            dtype=dtype,
            flops=4 * pairs * s.num_q_heads * s.head_dim,
            moved_bytes=kv_bytes * self._dtype.itemsize,
            make=make,
        )


def attention_cases(sizes: Sizes, dtype: str) -> Iterator[Case]:
    for rows, history in itertools.product(sizes.prefill_rows, sizes.histories):
        yield _prefill_case(sizes, dtype, rows, history)
    for batch, context in itertools.product(sizes.batches, sizes.contexts):
        yield _decode_case(sizes, dtype, batch, context)
    yield _ring_case(sizes, dtype)


def _attend(q_bhnd: Tensor, kv: tuple[Tensor, Tensor], seen: Tensor | None, scale: float) -> Tensor:
    return functional.scaled_dot_product_attention(
        q_bhnd, *kv, attn_mask=seen, scale=scale, enable_gqa=True
    )


def _prefill_case(sizes: Sizes, dtype: str, rows: int, history: int) -> Case:
    paged = PagedKv(sizes, dtype, batch=1, q_len=rows, kv_len=history + rows)

    def make() -> Sides:
        plan, layer = paged.plan(), paged.layer()
        kv, q_bhnd = paged.gathered(layer), paged.q_nhd.transpose(0, 1)[None]
        position = torch.arange(history + rows)
        seen = position[None, :] <= position[history:, None]

        def other() -> Tensor:
            if history:
                return _attend(q_bhnd, kv, seen, sizes.scale)[0].transpose(0, 1)
            out: Tensor = functional.scaled_dot_product_attention(
                q_bhnd, *kv, is_causal=True, scale=sizes.scale, enable_gqa=True
            )
            return out[0].transpose(0, 1)

        return Sides(
            lambda: api.run_attention(plan, paged.q_nhd, layer, scale=sizes.scale)[0], other
        )

    pairs = rows * history + rows * (rows + 1) / 2
    return paged.case("prefill", f"{rows} rows after {history}", dtype, pairs, make)


def _decode_case(sizes: Sizes, dtype: str, batch: int, context: int) -> Case:
    paged = PagedKv(sizes, dtype, batch=batch, q_len=1, kv_len=context)

    def make() -> Sides:
        plan, first = paged.plan(), paged.layer()
        layers = copies(first, sizes)
        gathered = turns([paged.gathered(layer) for layer in layers])
        layer, q_bhnd = turns(layers), paged.q_nhd[:, :, None]
        return Sides(
            lambda: api.run_attention(plan, paged.q_nhd, next(layer), scale=sizes.scale)[0],
            lambda: _attend(q_bhnd, next(gathered), None, sizes.scale)[:, :, 0],
        )

    return paged.case("decode", f"{batch} x {context}", dtype, batch * context, make)


def _ring_case(sizes: Sizes, dtype: str) -> Case:
    """Makes the first step of a rank of four: its own zigzag blocks, the second and the seventh."""
    tokens, half = sizes.ring_tokens, sizes.ring_tokens // 2
    paged = PagedKv(sizes, dtype, batch=1, q_len=tokens, kv_len=tokens)
    position = torch.cat([torch.arange(half) + half, torch.arange(half) + 6 * half]).int()

    def make() -> Sides:
        plan, layer = paged.plan(position), paged.layer()
        kv, q_bhnd = paged.gathered(layer), paged.q_nhd.transpose(0, 1)[None]
        seen = position[None, :] <= position[:, None]
        return Sides(
            lambda: api.run_attention(plan, paged.q_nhd, layer, scale=sizes.scale)[0],
            lambda: _attend(q_bhnd, kv, seen, sizes.scale)[0].transpose(0, 1),
        )

    pairs = tokens * (tokens + 1) / 2
    return paged.case("ring", f"{tokens} rows in zigzag", dtype, pairs, make)
