"""Attention of decode steps by tables at fixed addresses, as a CUDA graph needs them.

A graph launches the same kernels over the same memory at every replay. So a graph has room for a
number of rows and of work items, and a step that fits writes its tables there. A row of padding has
no item, and an item of padding has no rows: their programs return at once, and write nothing.

Triton computes these steps whatever computes the others: its tables are plain arrays that any step
may write, and its results depend on the row alone, not on the padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from millrace_kernels import triton_backend
from millrace_kernels.plan import AttentionPlan, Backend

Words = npt.NDArray[np.int32]


def refusal(like: AttentionPlan) -> str:
    """Returns why plans like `like` can't have tables at fixed addresses, or ""."""
    return triton_backend.unavailable(like.device) or triton_backend.refusal(
        like.dtype, like.head_dim
    )


@dataclass(frozen=True, slots=True)
class Room:
    """The most rows and work items of a step."""

    rows: int
    items: int

    @property
    def words(self) -> int:
        """The int32 words of the tables."""
        return 9 * self.items + 5 * self.rows  # items; merges and positions of the rows


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of one step, on the host."""

    items: Words  # [items, 9]
    merges: Words  # [merges, 4]
    positions: Words  # [b]

    def write(self, room: Room, tables: Words) -> None:
        """Fills the tables, int32 [room.words], of which `StepAttention.bind` has the copy."""
        tables.fill(0)
        parts = (self.items, self.merges, self.positions)
        starts = (0, 9 * room.items, 9 * room.items + 4 * room.rows)
        for part, start in zip(parts, starts, strict=True):
            tables[start : start + part.size] = part.ravel()


class StepAttention:
    """Plans decode steps that are alike but for their lengths and pages."""

    def __init__(self, like: AttentionPlan) -> None:
        """`like`: a plan of any decode step. Raises ValueError where `refusal` has a reason."""
        from millrace_kernels.triton_backend import configs

        if reason := refusal(like):
            raise ValueError(f"decode steps at fixed addresses: {reason}")
        self._like = replace(like, backend=Backend.TRITON)
        self._config = configs.lookup("attend_few", like.device, like.dtype, like.head_dim)

    def work(self, kv_lens: Tensor) -> StepWork:
        """Plans a step over int32 [b] K/V slots, on the host."""
        from millrace_kernels.triton_backend import attention_plan

        size = len(kv_lens)
        plan = self._plan(size, kv_lens)
        work = attention_plan.build_work(plan, self._config, np.ones(size, dtype=np.bool_))
        return StepWork(work.items, work.merges, kv_lens.numpy() - 1)

    def most_items(self, context: int) -> int:
        """Returns the most work items of one sequence of up to `context` K/V slots."""
        # Items grow with the length up to a window, and then repeat with the kernel's blocks.
        first = max(1, context + 1 - 2 * self._config["block_n"])
        items = self.work(torch.arange(first, context + 1, dtype=torch.int32)).items
        return int(np.bincount(items[:, 0]).max())

    def bind(
        self, room: Room, tables: Tensor, page_table: Tensor, partial: Sequence[Tensor]
    ) -> AttentionPlan:
        """Returns the plan of `room.rows` rows that reads the tables on the device at each run.

        tables: int32 [room.words]; page_table: int32 [rows, width]; partial: memory for partial
        results, float32 [items, h, d] and [items, h].
        """
        from millrace_kernels.triton_backend import attention, attention_plan

        sizes = (9 * room.items, 4 * room.rows, room.rows)
        items, merges, positions = tables.split_with_sizes(sizes)
        plan = self._plan(room.rows, torch.ones(room.rows, dtype=torch.int32))
        plan.native = attention.TritonPlan(
            checked=plan,
            launches=(
                attention.Launch(
                    self._config,
                    attention_plan.block_m(plan, self._config),
                    items.view(-1, 9),
                    merges.view(-1, 4),
                    partial[0][: room.items],
                    partial[1][: room.items],
                ),
            ),
            page_table=page_table,
            q_positions=positions,
            kv_positions=None,
            last_page=-1,  # the pool gave the pages
        )
        return plan

    def _plan(self, rows: int, kv_lens: Tensor) -> AttentionPlan:
        return replace(
            self._like,
            q_indptr=torch.arange(rows + 1, dtype=torch.int32),
            kv_lens=kv_lens,
            sequences=((0, rows, 0),),  # of which the number of rows is read
            native=None,
            device_table=None,
        )
