"""The passes of one stage: its layers, over rows that the stage before hands on.

What a stage hands on is the sum of its last layer and the residual before it, [rows, H] of the
model's dtype: all that the next layer begins with.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from millrace.engine.kv_pool import KvPool
from millrace.engine.loader import Model
from millrace.engine.mixed_pass import RaggedTables
from millrace.engine.model_runner import Boundary, check_layout
from millrace.engine.operators import Activations, Operator, build_operators, required
from millrace.engine.parallel.stage import Stage
from millrace.engine.pass_states import PassStates
from millrace.engine.remote_attention import RemoteAttention
from millrace.engine.ring_attention import RingAttention, RingTask
from millrace.engine.scratch import Scratch

Fetch = Callable[[Tensor], None]
"""Writes the rows that were handed on to memory [n, H]."""
HandOn = Callable[[Tensor, Tensor], None]
"""Takes the two summands [r, H] of what the next stage begins with."""


class StagePasses:
    """A stage's layers bound to the pool of their KV. One thread at a time runs them."""

    def __init__(
        self,
        model: Model,
        pool: KvPool,
        stage: Stage,
        whole: Tensor,
        attention_backend: str = "auto",
    ) -> None:
        """whole: the storage of all layers' pages, in which the ring's buffers lie.

        Raises ModelError when the pool was made for another model or other layers.
        """
        check_layout(model, pool)
        self.model = model
        self.stage = stage
        self._kv_layers = [pool.layer(i) for i in range(model.config.num_layers)]
        self._memory = whole.flatten(0, 1)
        self.states = PassStates(model, pool.layout, attention_backend)
        config = model.config
        self.operators = build_operators(config, model.weights, self._kv_layers, None)
        first = model.layers.start
        self._boundaries = {
            op: Boundary(op.layer if op.name == "embed" else first + op.layer, op.name)
            for op in self.operators
        }
        is_host = model.device.type == "cpu"
        self._scratch = Scratch(model.dtype) if is_host else None

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
        hand on. `remote`: where holders have some of what the rows attend to.
        """
        is_last = self.stage.is_last
        state = self.states.ragged(tables, self._scratch, is_cut=is_cut and is_last)
        state.remote = remote
        operators = self._kv_only() if kv_only and is_last else self.operators
        return self._run(state, operators, fetch, hand_on)

    def ring(self, task: RingTask, *, fetch: Fetch | None, hand_on: HandOn) -> Generator[Boundary]:
        """The stage's part of `ModelRunner.prefill_ring`, whose link counts the stage's own layers.

        Nothing comes and nothing is handed on where the task has no tokens; nor does the last stage
        hand anything on where it wants no rows.
        """
        is_last = self.stage.is_last
        windows = self.model.config.sliding_windows
        ring = RingAttention(
            task, self._memory, self.states.plan_block, windows, to_the_end=is_last
        )
        operators = self._kv_only() if is_last and not task.wants_rows else self.operators
        if not len(task.token_ids):
            return self._serve(ring, operators)
        return self._run(self.states.ring(task, ring, self._scratch), operators, fetch, hand_on)

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
