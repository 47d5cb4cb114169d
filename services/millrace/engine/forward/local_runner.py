"""A model in one stage over the paged KV pool: prefill operator by operator, decode by steps."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor

from millrace.engine.attention.kvp_owner import Remote, RemoteAttention
from millrace.engine.attention.ring import RingTask
from millrace.engine.forward.mixed_pass import (
    NO_DECODES,
    DecodeRows,
    hand_out_lost,
    mixed_tables,
    prompt_tables,
    remote_attention,
)
from millrace.engine.forward.passes import Boundary, Passes, Processes
from millrace.engine.forward.prefill_task import PrefillTask, check_tasks, hand_out
from millrace.engine.kv.page_table import PageTable
from millrace.engine.model.operators import Activations


class ModelRunner:
    """A `Runner` of a model in one stage, in one process or split over ranks."""

    in_flight = None

    def __init__(self, passes: Passes) -> None:
        self.passes = passes
        self.model = passes.model
        self.pool = passes.pool
        self.storage = passes.storage
        self.states = passes.states
        self.remote: Remote | None = None

    @property
    def processes(self) -> Processes | None:
        """`Runner.processes`."""
        return self.passes.processes

    def prefill_batch(self, tasks: Sequence[PrefillTask]) -> Generator[Boundary]:
        """`Runner.prefill_batch`."""
        page_tokens = self.pool.layout.page_tokens
        check_tasks(tasks, page_tokens)
        tables = prompt_tables(tasks, page_tokens, self.remote)
        keeps_all = any(task.want_hidden for task in tasks)
        remote = remote_attention(self.remote, tables, self.passes.shared)
        steps = self.passes.run(
            tables,
            is_cut=not keeps_all,
            kv_only=not (keeps_all or len(tables.rows)),
            fetch=None,
            finish=lambda state: hand_out(tasks, iter(state.logits), state.hidden),
            remote=remote,
        )
        return steps if remote is None else _with_lost(remote, tasks, steps)

    def prefill_ring(self, task: RingTask) -> Generator[Boundary]:
        """`Runner.prefill_ring`."""
        task.check()

        def finish(state: Activations) -> None:
            hand_out([task], iter(state.logits), state.hidden)

        return self.passes.ring(task, fetch=None, finish=finish)

    def decode(
        self, token_ids: Tensor, positions: Tensor, page_table: Tensor, kv_lens: Tensor
    ) -> Tensor:
        """`Runner.decode`."""
        return self.passes.decode(token_ids, positions, page_table, kv_lens).logits

    def mixed(
        self, decodes: DecodeRows, page_table: Tensor, tasks: Sequence[PrefillTask]
    ) -> Tensor:
        """`Runner.mixed`."""
        page_tokens, size = self.pool.layout.page_tokens, len(decodes)
        if tasks or not size:
            check_tasks(tasks, page_tokens)
        tables = mixed_tables(decodes, page_table, tasks, page_tokens, self.remote)
        keeps_all = any(task.want_hidden for task in tasks)
        remote = remote_attention(self.remote, tables, self.passes.shared)
        logits = torch.empty(0, self.model.config.vocab_size, device=self.model.device)

        def finish(state: Activations) -> None:
            nonlocal logits
            logits = state.logits
            hand_out(tasks, iter(logits[size:]), state.hidden, size)

        for _ in self.passes.run(
            tables,
            is_cut=not keeps_all,
            kv_only=not (keeps_all or len(tables.rows)),
            fetch=None,
            finish=finish,
            remote=remote,
        ):
            pass
        if remote is not None:
            hand_out_lost(remote.end(), decodes, tasks)
        return logits[:size]

    def follow(self, page_table: PageTable) -> None:
        """`Runner.follow`."""
        self.passes.follow(page_table)

    def capture_prefills(self) -> None:
        """`Runner.capture_prefills`."""
        self.passes.capture_prefills()

    def project(self, hidden: Tensor) -> Tensor:
        """`Runner.project`."""
        return self.passes.project(hidden)

    def copy_page(self, source: int, target: int) -> None:
        """`Runner.copy_page`."""
        self.pool.require_held((source, target))
        self.passes.copy_page(source, target)


def _with_lost(
    remote: RemoteAttention, tasks: Sequence[PrefillTask], steps: Generator[Boundary]
) -> Generator[Boundary]:
    """Tells the tasks at the end of the pass which rows are wrong."""
    try:
        yield from steps
    finally:
        hand_out_lost(remote.end(), NO_DECODES, tasks)
