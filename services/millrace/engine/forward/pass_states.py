"""The activations that a pass begins with: rows, positions, K/V slots, plans of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from millrace.core.kv.layout import KvLayout
from millrace.engine.attention.ring import KvBlock, RingAttention, RingTask
from millrace.engine.forward.mixed_pass import RaggedTables
from millrace.engine.kv.page_table import PageTable
from millrace.engine.kv.step_tables import indptr_of, one_each, slots_of
from millrace.engine.model.loader import Model
from millrace.engine.model.operators import Activations
from millrace.engine.model.rope import Rotary
from millrace.engine.model.scratch import Scratch
from millrace_kernels import api as kernels
from millrace_kernels.plan import AttentionPlan, Backend


class PassStates:
    """Makes `Activations` for passes of a model, or of a stage's layers of one."""

    def __init__(self, model: Model, layout: KvLayout, attention_backend: str) -> None:
        self._model = model
        self._layout = layout
        self._backend = attention_backend
        is_ordered = attention_backend == Backend.FLASHINFER  # takes K/V in order alone
        self._ring_backend = Backend.AUTO if is_ordered else attention_backend
        self._windows = tuple(dict.fromkeys(model.config.sliding_windows))
        self.page_table: PageTable | None = None
        """The table of a decode batch, whose copy on the device passes read. The batch's owner sets
        it."""
        self.rotary = Rotary(model.config.rope, model.config.head_dim, model.device)

    def attention_backend(self) -> Backend:
        """The backend that computes the attention of a decode step.

        Raises ValueError when the configured backend can't, for this model on this device.
        """
        page = torch.zeros(1, 1, dtype=torch.int32)
        plans = self._plans(one_each(1), torch.ones(1, dtype=torch.int32), page)
        return plans[self._windows[0]].backend

    def decode(
        self,
        token_ids: Tensor,
        positions: Tensor,
        page_table: Tensor,
        kv_lens: Tensor,
        scratch: Scratch | None,
    ) -> Activations:
        """Makes the activations of a decode step; arguments as of `Runner.decode`."""
        size, device = len(positions), self._model.device
        cos, sin = self.rotary(positions.to(device))
        return Activations(
            num_tokens=size,
            token_ids=token_ids.to(device),
            slots=self.slots(positions, page_table),
            cos=cos,
            sin=sin,
            lse=self._room_for_lse(size),
            plans=self._plans(one_each(size), kv_lens, page_table),
            scratch=scratch,
        )

    def slots(self, positions: Tensor, page_table: Tensor) -> Tensor:
        """Returns int64 [b]: the slots of a step's new tokens' K/V."""
        rows, page_tokens = one_each(len(positions))[:-1], self._layout.page_tokens
        return slots_of(page_table, rows, positions, page_tokens).to(self._model.device)

    def ragged(self, tables: RaggedTables, scratch: Scratch | None, *, is_cut: bool) -> Activations:
        """Makes the activations of a prefill or mixed pass. `is_cut`: the last layer computes the
        wanted rows alone, at the latest after its attention."""
        device = self._model.device
        positions = tables.positions.to(torch.int32) if tables.remote else None
        rows = len(tables.token_ids)
        cos, sin = self.rotary(tables.positions.to(device))
        state = Activations(
            num_tokens=rows,
            token_ids=tables.token_ids.to(device),
            slots=tables.slots.to(device),
            cos=cos,
            sin=sin,
            lse=self._room_for_lse(rows),
            plans=self._plans(tables.indptr, tables.kv_lens, tables.page_table, positions),
            scratch=scratch,
        )
        state.rows = tables.rows.to(device)
        state.keeps_rows = is_cut and bool(tables.remote)
        if is_cut and not tables.remote:
            window = self._model.config.sliding_windows[-1]
            state.last_plan = self._plan(
                tables.wanted_indptr, tables.kv_lens, tables.page_table, window
            )
        return state

    def ring(self, task: RingTask, ring: RingAttention, scratch: Scratch | None) -> Activations:
        """Makes the activations of a member's part of a pass of an SP group."""
        device = self._model.device
        cos, sin = self.rotary(task.positions.to(device))
        rows = [len(task.token_ids) - 1] if task.want_logits else []
        return Activations(
            num_tokens=len(task.token_ids),
            token_ids=task.token_ids.to(device),
            slots=task.slots.to(device),
            cos=cos,
            sin=sin,
            lse=self._room_for_lse(0),
            plans={},
            ring=ring,
            rows=torch.tensor(rows, dtype=torch.int64, device=device),
            scratch=scratch,
        )

    def _room_for_lse(self, tokens: int) -> Tensor:
        heads = self._model.config.num_heads
        return torch.empty(tokens, heads, dtype=torch.float32, device=self._model.device)

    def _plans(
        self, indptr: Tensor, kv_lens: Tensor, table: Tensor, positions: Tensor | None = None
    ) -> dict[int | None, AttentionPlan]:
        return {w: self._plan(indptr, kv_lens, table, w, positions) for w in self._windows}

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
