"""Attention over paged K/V on a CUDA device: puts the plan's tables there and launches the kernels.

Shape letters: n tokens of all sequences, h q heads, k kv heads, d head_dim, B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace_kernels.plan import AttentionPlan
from millrace_kernels.triton_backend import attention_plan, configs
from millrace_kernels.triton_backend.configs import Config
from millrace_kernels.triton_backend.jit import block, dot_precision, launch
from millrace_kernels.triton_backend.kernels import attention as kernels

_MERGED_AT_ONCE = 8
"""Partial results of a row that one step of the merge reads."""


@dataclass(frozen=True, slots=True)
class Launch:
    """The sequences that share one configuration: `items` int32 [items, 9], `merges` int32 [merges,
    4] on the device, and memory for partial results, float32 [rows, h, d] and [rows, h].
    """

    config: Config
    block_m: int
    items: Tensor
    merges: Tensor
    partial: Tensor
    partial_lse: Tensor


@dataclass(frozen=True, slots=True)
class TritonPlan:
    """A plan's tables on its device; serves every layer of the step, one layer after another."""

    checked: AttentionPlan
    launches: tuple[Launch, ...]
    page_table: Tensor  # int32 [B, max_pages]
    q_positions: Tensor  # int32 [n]
    kv_positions: Tensor | None  # int32 [sum(kv_lens)]
    last_page: int

    def run(
        self, q_nhd: Tensor, kv_layer: Tensor, *, scale: float, out_nhd: Tensor, lse_nh: Tensor
    ) -> None:
        """Fills out_nhd (the plan's dtype or float32) and lse_nh, both contiguous.

        Raises IndexError when the plan has a page that kv_layer lacks, ValueError when a head's
        numbers are not contiguous, or scale is not above 0, which the kernel relies on.
        """
        if scale <= 0:
            raise ValueError(f"scale is {scale:g}; it must be above 0")
        if self.last_page >= kv_layer.shape[0]:
            raise IndexError(f"page {self.last_page} is past the pool's {kv_layer.shape[0]}")
        if q_nhd.stride(2) != 1 or kv_layer.stride(4) != 1:
            raise ValueError("q and kv_layer need contiguous numbers in each head")
        for part in self.launches:
            self._attend(part, q_nhd, kv_layer, scale, out_nhd, lse_nh)

    def _attend(
        self,
        part: Launch,
        q_nhd: Tensor,
        kv_layer: Tensor,
        scale: float,
        out_nhd: Tensor,
        lse_nh: Tensor,
    ) -> None:
        plan, config = self.checked, part.config
        launch(
            kernels.attend,
            (part.items.shape[0], plan.num_kv_heads),
            q_nhd,
            kv_layer,
            out_nhd,
            lse_nh,
            part.partial,
            part.partial_lse,
            part.items,
            self.page_table,
            self.q_positions,
            self.q_positions if self.kv_positions is None else self.kv_positions,
            scale,
            plan.soft_cap or 0.0,
            plan.sliding_window or 0,
            self.page_table.stride(0),
            *q_nhd.stride()[:2],
            *kv_layer.stride()[:4],
            GROUP=plan.num_q_heads // plan.num_kv_heads,
            HEAD_DIM=plan.head_dim,
            BLOCK_D=block(max(plan.head_dim, 16)),
            BLOCK_M=part.block_m,
            BLOCK_N=config["block_n"],
            PAGE_TOKENS=plan.page_tokens,
            CAUSAL=plan.causal,
            WINDOWED=plan.sliding_window is not None,
            CAPPED=plan.soft_cap is not None,
            PLACED=self.kv_positions is not None,
            PRECISION=dot_precision(plan.dtype),
            num_warps=config["num_warps"],
            num_stages=config["num_stages"],
            max_registers=config.get("max_registers", 0),
        )
        if part.merges.shape[0]:
            launch(
                kernels.merge_pieces,
                (part.merges.shape[0], plan.num_q_heads),
                out_nhd,
                lse_nh,
                part.partial,
                part.partial_lse,
                part.merges,
                HEAD_DIM=plan.head_dim,
                BLOCK_D=block(plan.head_dim),
                BLOCK_P=_MERGED_AT_ONCE,
                num_warps=1,
            )


def plan(checked: AttentionPlan) -> TritonPlan:
    """Copies tables, work lists and memory for partial results of one step in one transfer; a page
    table that is on the device already is not copied.

    Raises ValueError for a dtype or head_dim that no configuration covers, IndexError for a page
    below 0.
    """
    device, dtype = checked.device, checked.dtype
    page_table = checked.page_table.cpu().numpy()
    lengths = np.diff(checked.q_indptr.numpy())
    few = configs.lookup("attend_few", device, dtype, checked.head_dim)
    many = configs.lookup("attend_rows", device, dtype, checked.head_dim)
    is_few = lengths <= attention_plan.tile_rows(checked, few)
    lists = [
        (config, attention_plan.build_work(checked, config, chosen & (lengths > 0)))
        for config, chosen in ((few, is_few), (many, ~is_few))
    ]
    lists = [(config, work) for config, work in lists if len(work.items)]
    kept = checked.device_table
    host = [
        page_table if kept is None else page_table[:0],
        attention_plan.row_positions(checked).astype(np.int32),
        np.zeros(0, np.int32) if checked.kv_positions is None else checked.kv_positions.numpy(),
    ]
    for _, work in lists:
        host += [work.items, work.merges]
    pages, q_positions, kv_positions, *rest = _copy_over(host, device)
    return TritonPlan(
        checked=checked,
        launches=tuple(
            _launch(checked, config, work, *rest[2 * i : 2 * i + 2])
            for i, (config, work) in enumerate(lists)
        ),
        page_table=pages if kept is None else kept,
        q_positions=q_positions,
        kv_positions=None if checked.kv_positions is None else kv_positions,
        last_page=_last_page(checked, page_table),
    )


def _launch(
    checked: AttentionPlan, config: Config, work: attention_plan.Work, items: Tensor, merges: Tensor
) -> Launch:
    shape = (work.partial_rows, checked.num_q_heads, checked.head_dim)
    return Launch(
        config,
        attention_plan.block_m(checked, config),
        items,
        merges,
        torch.empty(shape, dtype=torch.float32, device=checked.device),
        torch.empty(shape[:2], dtype=torch.float32, device=checked.device),
    )


def _copy_over(tables: list[npt.NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """Copies the tables to the device in one asynchronous copy; each starts at a multiple of 64
    bytes.
    """
    starts = np.cumsum([0, *(-(-table.size // 16) * 16 for table in tables)])
    packed = torch.empty(int(starts[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    for start, table in zip(starts[:-1], tables, strict=True):
        packed.numpy()[start : start + table.size] = table.ravel()
    there = packed.to(device, non_blocking=True)
    return [
        there[start : start + table.size].view(table.shape)
        for start, table in zip(starts[:-1].tolist(), tables, strict=True)
    ]


def _last_page(checked: AttentionPlan, table: npt.NDArray[np.int32]) -> int:
    """Returns the highest page that any sequence reads; -1 when none reads any."""
    pages = -(-checked.kv_lens.numpy() // checked.page_tokens)
    used = table[np.arange(table.shape[1])[None, :] < pages[:, None]]
    if used.size and used.min() < 0:
        raise IndexError(f"page {used.min()} in the page table")
    return int(used.max()) if used.size else -1


def merge_attention_(
    out_nhd: Tensor, lse_nh: Tensor, other_out_nhd: Tensor, other_lse_nh: Tensor
) -> None:
    """Merges the attention over other K/V into out_nhd and lse_nh in place.

    Float32 inside; a side whose lse is -inf has no weight. Raises ValueError unless out_nhd and
    lse_nh are contiguous.
    """
    if not out_nhd.is_contiguous() or not lse_nh.is_contiguous():
        raise ValueError(f"out {tuple(out_nhd.shape)} and its lse must be contiguous")
    if not lse_nh.numel():
        return
    head_dim = out_nhd.shape[-1]
    launch(
        kernels.merge_partial,
        (lse_nh.numel(),),
        out_nhd,
        lse_nh,
        other_out_nhd.contiguous(),
        other_lse_nh.contiguous(),
        HEAD_DIM=head_dim,
        BLOCK_D=block(head_dim),
        num_warps=1,
    )
