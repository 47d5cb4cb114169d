"""The activations that a pass begins with: rows, positions, K/V slots, plans of attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container
from dataclasses import dataclass, field

import torch
from torch import Tensor

from millrace.core.kv.layout import KvLayout
from millrace.engine.attention.ring import KvBlock, RingAttention, RingTask
from millrace.engine.device.copies import upload
from millrace.engine.forward.mixed_pass import RaggedTables
from millrace.engine.forward.row_slices import SLICE_FLOPS, cut_rows
from millrace.engine.kv.page_table import PageTable
from millrace.engine.kv.step_tables import indptr_of, one_each, slots_of
from millrace.engine.model.loader import Model
from millrace.engine.model.operators import Activations, PlannedRows
from millrace.engine.model.rope import Rotary
from millrace.engine.model.scratch import Scratch
from millrace_kernels import api as kernels
from millrace_kernels.plan import AttentionPlan, Backend


@dataclass(slots=True)
class StepCounts:
    """Decode steps, or passes over prompts, on a GPU so far: by CUDA graphs, and `eager`, operator
    by operator, by the reason."""

    graph: int = 0
    eager: Counter[str] = field(default_factory=Counter)


class PassStates:
    """Makes `Activations` for passes of a model, or of a stage's layers of one."""

    def __init__(self, model: Model, layout: KvLayout, attention_backend: str) -> None:
        self._model = model
        self._layout = layout
        self._backend = attention_backend
        is_ordered = attention_backend == Backend.FLASHINFER  # takes K/V in order alone
        self._ring_backend = Backend.AUTO if is_ordered else attention_backend
        self._windows = tuple(dict.fromkeys(model.config.sliding_windows))
        self.slice_flops = SLICE_FLOPS
        self.steps = StepCounts()
        self.prefills = StepCounts()
        self.page_table: PageTable | None = None
        """The table of a decode batch, whose copy on the device passes read; see
        `Runner.follow`."""
        self.rotary = Rotary(model.config.rope, model.config.head_dim, model.device)

    def attention_backend(self) -> Backend:
        """The backend that computes the attention of a decode step.

        Raises ValueError when the configured backend can't, for this model on this device.
        """
        return self.step_plans()[self._windows[0]].backend

    def step_plans(self) -> dict[int | None, AttentionPlan]:
        """Plans a decode step of one token, by sliding window. Raises ValueError as
        `attention_backend` does."""
        page = torch.zeros(1, 1, dtype=torch.int32)
        return self._plans(one_each(1), torch.ones(1, dtype=torch.int32), page)

    def decode(
        self,
        token_ids: Tensor,
        positions: Tensor,
        page_table: Tensor,
        kv_lens: Tensor,
        scratch: Scratch | None,
    ) -> Activations:
        """Makes the activations of a decode step; arguments as of `Runner.decode`."""
        size = len(positions)
        slots = self.slots(positions, page_table)
        plans = self._plans(one_each(size), kv_lens, page_table)
        token_ids, positions, slots = upload(self._model.device, token_ids, positions, slots)
        return self.of_step(token_ids, positions, slots, plans, scratch)

    def of_step(
        self,
        token_ids: Tensor,
        positions: Tensor,
        slots: Tensor,
        plans: dict[int | None, AttentionPlan],
        scratch: Scratch | None = None,
    ) -> Activations:
        """Makes the activations of a decode step from int64 [b] each, on the model's device."""
        cos, sin = self.rotary(positions)
        return Activations(
            num_tokens=len(positions),
            token_ids=token_ids,
            slots=slots,
            cos=cos,
            sin=sin,
            lse=self._room_for_lse(len(positions)),
            plans=plans,
            scratch=scratch,
        )

    def pages_of(self, tokens: int) -> int:
        """Returns the pages that hold so many tokens."""
        return self._layout.pages_for(tokens)

    def slots(self, positions: Tensor, page_table: Tensor) -> Tensor:
        """Returns int64 [b] on the host: the slots of a step's new tokens' K/V."""
        rows, page_tokens = one_each(len(positions))[:-1], self._layout.page_tokens
        return slots_of(page_table, rows, positions, page_tokens)

    def ragged(self, tables: RaggedTables, scratch: Scratch | None, *, is_cut: bool) -> Activations:
        """Makes the activations of a prefill or mixed pass. `is_cut`: the last layer computes the
        wanted rows alone, at the latest after its attention."""
        given = tables.positions.to(torch.int32) if tables.remote else None
        size = len(tables.token_ids)
        token_ids, positions, slots, rows = upload(
            self._model.device, tables.token_ids, tables.positions, tables.slots, tables.rows
        )
        cos, sin = self.rotary(positions)
        sliced = {} if tables.remote else self._sliced(tables)
        state = Activations(
            num_tokens=size,
            token_ids=token_ids,
            slots=slots,
            cos=cos,
            sin=sin,
            lse=self._room_for_lse(size),
            plans=self._plans(
                tables.indptr, tables.kv_lens, tables.page_table, given, without=sliced
            ),
            sliced=sliced,
            scratch=scratch,
        )
        state.rows = rows
        state.keeps_rows = is_cut and bool(tables.remote)
        if is_cut and not tables.remote:
            window = self._model.config.sliding_windows[-1]
            state.last_plan = self._plan(
                tables.wanted_indptr, tables.kv_lens, tables.page_table, window
            )
        return state

    def ring(self, task: RingTask, ring: RingAttention, scratch: Scratch | None) -> Activations:
        """Makes the activations of a member's part of a pass of an SP group."""
        rows = [len(task.token_ids) - 1] if task.want_logits else []
        token_ids, positions, slots, wanted = upload(
            self._model.device,
            task.token_ids,
            task.positions,
            task.slots,
            torch.tensor(rows, dtype=torch.int64),
        )
        cos, sin = self.rotary(positions)
        return Activations(
            num_tokens=len(task.token_ids),
            token_ids=token_ids,
            slots=slots,
            cos=cos,
            sin=sin,
            lse=self._room_for_lse(0),
            plans={},
            ring=ring,
            rows=wanted,
            scratch=scratch,
        )

    def _sliced(self, tables: RaggedTables) -> dict[int | None, list[PlannedRows]]:
        """Plans, by sliding window, the attention that is computed in slices of rows.

        None on the CPU, where chunks are small and an operator is as short as its chunk.
        """
        if self._model.device.type == "cpu":
            return {}
        config = self._model.config
        flops_per_slot = 4.0 * config.num_heads * config.head_dim
        sliced = {}
        for window in self._windows:
            slices = cut_rows(
                tables.indptr,
                tables.kv_lens,
                flops_per_slot=flops_per_slot,
                window=window,
                slice_flops=self.slice_flops,
            )
            if slices:
                sliced[window] = [
                    PlannedRows(
                        one.start,
                        one.stop,
                        self._plan(one.indptr, one.kv_lens, tables.page_table, window),
                    )
                    for one in slices
                ]
        return sliced

    def _room_for_lse(self, tokens: int) -> Tensor:
        heads = self._model.config.num_heads
        return torch.empty(tokens, heads, dtype=torch.float32, device=self._model.device)

    def _plans(
        self,
        indptr: Tensor,
        kv_lens: Tensor,
        table: Tensor,
        positions: Tensor | None = None,
        *,
        without: Container[int | None] = (),
    ) -> dict[int | None, AttentionPlan]:
        """Plans the attention of each sliding window, `without` some of them."""
        return {
            window: self._plan(indptr, kv_lens, table, window, positions)
            for window in self._windows
            if window not in without
        }

    def plan_block(self, rows: Tensor, block: KvBlock, window: int | None) -> AttentionPlan:
        """Plans the attention of rows at positions (int32 [r]) over a block of a ring."""
        slots = torch.tensor([len(block.positions)], dtype=torch.int32)
        table = block.pages[None]
        return self._plan(indptr_of([len(rows)]), slots, table, window, rows, block.positions)

    def _plan(
        self,
        indptr: Tensor,
        kv_lens: Tensor,
        table: Tensor,
        window: int | None,
        q_positions: Tensor | None = None,
        kv_positions: Tensor | None = None,
    ) -> AttentionPlan:
        config, layout = self._model.config, self._layout
        return kernels.plan_attention(
            q_indptr=indptr,
            kv_lens=kv_lens,
            page_table=table,
            page_tokens=layout.page_tokens,
            num_q_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=self._model.dtype,
            device=self._model.device,
            q_positions=q_positions,
            kv_positions=kv_positions,
            sliding_window=window,
            backend=self._backend if q_positions is None else self._ring_backend,
            device_table=None if self.page_table is None else self.page_table.copy_of(table),
        )
