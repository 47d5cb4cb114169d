"""The passes of one stage: its layers, over rows that the stage before hands on.

What a stage hands on is the sum of its last layer and the residual before it, [rows, H] of the
model's dtype: all that the next layer begins with.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from millrace.core.kv.layout import KvLayout
from millrace.engine.attention.kvp_owner import RemoteAttention, RemoteLink
from millrace.engine.attention.ring import RingAttention, RingTask
from millrace.engine.forward.local_runner import Boundary, check_layout
from millrace.engine.forward.mixed_pass import RaggedTables
from millrace.engine.forward.pass_states import PassStates
from millrace.engine.forward.recorded_step import KeptTables, RecordedSteps
from millrace.engine.kv.pool import KvPool
from millrace.engine.model.communicator import Communicator, SplitHead
from millrace.engine.model.loader import Model
from millrace.engine.model.operators import (
    Activations,
    Head,
    Operator,
    build_operators,
    required,
    whole,
)
from millrace.engine.model.scratch import Scratch
from millrace.engine.model.stage import Stage
from millrace_kernels import api as kernels
from millrace_kernels.plan import Backend

Fetch = Callable[[Tensor], None]
"""Writes the rows that were handed on to memory [n, H]."""
HandOn = Callable[[Tensor, Tensor], None]
"""Takes the two summands [r, H] of what the next stage begins with."""


class Passes(Protocol):
    """What a stage can do, on one rank (`StagePasses`) or on several. One thread at a time uses it.

    EngineFallen, from whichever call meets it, is the end of the stage.
    """

    model: Model  # rank 0's
    stage: Stage

    def attention_backend(self) -> Backend:
        """`PassStates.attention_backend`."""

    def run(
        self,
        tables: RaggedTables,
        *,
        is_cut: bool,
        kv_only: bool,
        fetch: Fetch | None,
        hand_on: HandOn,
        remote: RemoteAttention | None = None,
    ) -> Generator[Boundary]:
        """A pass, yielding after every operator; its KV is in its pages as in `prefill_batch`.

        `fetch`: None at the first stage, which embeds. At the last stage `is_cut` hands on the
        wanted rows alone, and with `kv_only` the pass ends at the last ``attn``, with nothing to
        hand on. `remote`: where holders have some of what the rows attend to, by `shared`'s link.
        """

    def ring(self, task: RingTask, *, fetch: Fetch | None, hand_on: HandOn) -> Generator[Boundary]:
        """The stage's part of `ModelRunner.prefill_ring`, whose link counts the stage's own layers.

        Nothing comes and nothing is handed on where the task has no tokens; nor does the last stage
        hand anything on where it wants no rows.
        """

    def shared(self, link: RemoteLink) -> RemoteLink:
        """The link as a pass takes it."""

    def project(self, hidden: Tensor) -> Tensor:
        """`ModelRunner.project`, at the first stage."""

    def rest(self) -> None:
        """For a caller that leaves a pass and turns to nothing else for long."""

    def close(self) -> None:
        """Ends what other processes there are. Passes that were left are lost."""


class StagePasses:
    """`Passes` of one rank: a stage's layers, or its share of them, bound to their KV's pool."""

    def __init__(
        self,
        model: Model,
        stage: Stage,
        layout: KvLayout,
        memory: Tensor,
        attention_backend: str = "auto",
        ranks: Communicator | None = None,
    ) -> None:
        """`layout`: of all layers of the model, as memory [layers, pages, ...], in which the ring's
        buffers lie. `ranks`: those with which the stage is shared, which must all make the same
        calls.

        Raises ModelError when the layout was made for another model or other heads.
        """
        layers = model.layers
        part = replace(layout, num_layers=len(layers), layer_start=layers.start)
        pool = KvPool(part, model.device, memory[layers.start : layers.stop])
        check_layout(model, pool)
        self.model = model
        self.stage = stage
        self._kv_layers = [pool.layer(i) for i in range(model.config.num_layers)]
        self._memory = memory.flatten(0, 1)
        self._states = PassStates(model, part, attention_backend)
        config = model.config
        reduce = whole if ranks is None else ranks.all_reduce
        self.operators = build_operators(config, model.weights, self._kv_layers, None, reduce)
        self._lm_head = _head(model, ranks) if stage.is_first else None
        of_layers = self.operators[1:] if stage.is_first else self.operators
        steps = RecordedSteps(model, self._states, of_layers, records=True)
        self._steps = steps if ranks is None else None  # collectives can't be recorded
        self._tables = KeptTables()
        first = model.layers.start
        self._boundaries = {
            op: Boundary(op.layer if op.name == "embed" else first + op.layer, op.name)
            for op in self.operators
        }
        is_host = model.device.type == "cpu"
        self._scratch = Scratch(model.dtype) if is_host else None

    def attention_backend(self) -> Backend:
        """`PassStates.attention_backend`."""
        return self._states.attention_backend()

    def run(
        self,
        tables: RaggedTables,
        *,
        is_cut: bool,
        kv_only: bool,
        fetch: Fetch | None,
        hand_on: HandOn,
        remote: RemoteAttention | None = None,
    ) -> Generator[Boundary]:
        """`Passes.run`."""
        if self._steps is not None and tables.is_step:
            return self._step(self._steps, tables, fetch, hand_on)
        is_last = self.stage.is_last
        state = self._states.ragged(tables, self._scratch, is_cut=is_cut and is_last)
        state.remote = remote
        operators = self._kv_only() if kv_only and is_last else self.operators
        return self._run(state, operators, fetch, hand_on)

    def _step(
        self, steps: RecordedSteps, tables: RaggedTables, fetch: Fetch | None, hand_on: HandOn
    ) -> Generator[Boundary]:
        """A decode step, at once: it is short, and goes before others anyway."""

        def embed(x: Tensor) -> None:
            torch.index_select(required(self.model.weights.embedding), 0, tables.token_ids, out=x)

        kept = self._tables.hold(tables.page_table, tables.kv_lens)
        state = steps.run(fetch or embed, tables.token_ids, tables.positions, *kept)
        hand_on(state.x, required(state.residual))
        for operator in self.operators:  # a prompt's last row may come so, whose layers are told of
            yield self._boundaries[operator]

    def ring(self, task: RingTask, *, fetch: Fetch | None, hand_on: HandOn) -> Generator[Boundary]:
        """`Passes.ring`."""
        is_last = self.stage.is_last
        windows = self.model.config.sliding_windows
        ring = RingAttention(
            task, self._memory, self._states.plan_block, windows, to_the_end=is_last
        )
        operators = self._kv_only() if is_last and not task.wants_rows else self.operators
        if not len(task.token_ids):
            return self._serve(ring, operators)
        return self._run(self._states.ring(task, ring, self._scratch), operators, fetch, hand_on)

    def shared(self, link: RemoteLink) -> RemoteLink:
        """The link itself: nobody else is here."""
        return link

    def project(self, hidden: Tensor) -> Tensor:
        """`ModelRunner.project`, at the first stage."""
        return required(self._lm_head)(hidden).float()

    def is_attn(self, number: int) -> bool:
        """`ModelRunner.is_attn`."""
        return number < len(self.operators) and self.operators[number].name == "attn"

    def rest(self) -> None:
        """Nothing to bring to rest."""

    def close(self) -> None:
        """Nothing to end."""

    def _serve(self, ring: RingAttention, operators: Sequence[Operator]) -> Generator[Boundary]:
        """A pass without tokens."""
        config = self.model.config
        q_nhd = torch.empty((0, config.num_heads, config.head_dim), dtype=self.model.dtype)
        for operator in operators:
            if operator.name == "attn":
                ring.run(operator.layer, q_nhd, self._kv_layers[operator.layer], 1.0)
            yield self._boundaries[operator]

    def _run(
        self,
        state: Activations,
        operators: Sequence[Operator],
        fetch: Fetch | None,
        hand_on: HandOn,
    ) -> Generator[Boundary]:
        try:
            if fetch is not None:
                state.x = self._room(state)
                fetch(state.x)
            for operator in operators:
                operator.run(state)
                if operator is operators[-1] and operator.name != "attn":
                    hand_on(state.x, required(state.residual))
                yield self._boundaries[operator]
        finally:
            state.give_all()

    def _room(self, state: Activations) -> Tensor:
        hidden, model = self.model.config.hidden_size, self.model
        taken = state.take(hidden)
        if taken is None:
            return state.cos.new_empty((state.num_tokens, hidden), dtype=model.dtype)
        return taken

    def _kv_only(self) -> tuple[Operator, ...]:
        ends = [i for i, op in enumerate(self.operators) if op.name == "attn"]
        return self.operators[: ends[-1] + 1]


def _head(model: Model, ranks: Communicator | None) -> Head:
    head = kernels.prepare_linear(required(model.weights.lm_head))
    return head if ranks is None else SplitHead(head, ranks, model.config.vocab_size)
