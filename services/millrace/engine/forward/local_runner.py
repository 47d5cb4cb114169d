"""Runs a model over the paged KV pool: prefill operator by operator, decode a step at a time."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from millrace.core.errors import ModelError
from millrace.engine.attention.kvp_owner import Remote, RemoteAttention
from millrace.engine.attention.ring import RingAttention, RingTask
from millrace.engine.completion import Completion
from millrace.engine.errors import EngineDied
from millrace.engine.forward.mixed_pass import (
    NO_DECODES,
    DecodeRows,
    RaggedTables,
    hand_out_lost,
    mixed_tables,
    prompt_tables,
)
from millrace.engine.forward.pass_states import PassStates
from millrace.engine.forward.prefill_task import PrefillTask as PrefillTask
from millrace.engine.forward.prefill_task import check_tasks, hand_out
from millrace.engine.forward.recorded_step import RecordedSteps
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
from millrace_kernels import api as kernels
from millrace_kernels.plan import Backend


@dataclass(frozen=True, slots=True)
class Boundary:
    """A point between two operators, named by the operator that has just run.

    ``layer`` is -1 after ``embed`` and `num_layers` after ``lm_head``. With `awaited` nothing can
    be done before that is ready: the pass is in later stages of a pipeline.
    """

    layer: int
    operator: str
    awaited: Completion | None = None


class ModelRunner:
    """A model bound to a KV pool. One thread at a time runs it; suspended prefills may be many."""

    def __init__(
        self,
        model: Model,
        pool: KvPool,
        attention_backend: str = "auto",
        ranks: Communicator | None = None,
    ) -> None:
        """`ranks`: those with which the model is shared, which must all make the same calls.

        Raises ModelError when the pool was made for another model, dtype or share of its heads.
        """
        self.model = model
        self.pool = pool
        self.remote: Remote | None = None
        """The way to the holders of spread requests: the caller's to set, between passes."""
        check_layout(model, pool)
        self.states = PassStates(model, pool.layout, attention_backend)
        config = model.config
        kv_layers = [pool.layer(i) for i in range(config.num_layers)]
        head = kernels.prepare_linear(required(model.weights.lm_head))
        self._lm_head: Head = head if ranks is None else SplitHead(head, ranks, config.vocab_size)
        reduce = whole if ranks is None else ranks.all_reduce
        self.operators = build_operators(config, model.weights, kv_layers, self._lm_head, reduce)
        self._boundaries = {op: Boundary(op.layer, op.name) for op in self.operators}
        self._embedding = required(model.weights.embedding)
        layers = self.operators[1:-1]  # between embed and lm_head
        # Collectives leave no native calls to make again.
        self._steps = RecordedSteps(model, self.states, layers, records=ranks is None)
        # On other devices torch's allocator keeps memory itself.
        is_host = model.device.type == "cpu"
        self._prefill_scratch = Scratch(model.dtype) if is_host else None

    def attention_backend(self) -> Backend:
        """`PassStates.attention_backend`."""
        return self.states.attention_backend()

    def prefill(self, task: PrefillTask) -> Generator[Boundary]:
        """`prefill_batch` of one task."""
        return self.prefill_batch([task])

    def prefill_batch(self, tasks: Sequence[PrefillTask]) -> Generator[Boundary]:
        """Computes a ragged batch of chunks, yielding after every operator.

        The KV of a layer is in its pages once ``attn`` of that layer was yielded. The caller may
        stop at any boundary (`close()`), or leave the iterator suspended, run others, and go on.
        What nobody asked for is not computed: without logits the pass ends at the last layer's
        ``attn``. Raises ValueError when a task has no tokens or too few pages.
        """
        check_tasks(tasks, self.pool.layout.page_tokens)
        tables = prompt_tables(tasks, self.pool.layout.page_tokens, self.remote)
        is_cut = not any(task.want_prompt_logprobs for task in tasks)
        state = self.states.ragged(tables, self._prefill_scratch, is_cut=is_cut)
        wanted = any(task.want_logits or task.want_prompt_logprobs for task in tasks)
        steps = self._run(state, tasks, self.operators if wanted else self._kv_only())
        remote = self._attend_remotely(state, tables)
        return steps if remote is None else self._run_remote(remote, tasks, steps)

    def prefill_ring(self, task: RingTask) -> Generator[Boundary]:
        """A member's part of a pass of a group, as `prefill_batch`; see `ring_attention`.

        All members yield the same boundaries up to the last layer's ``attn``, where those end that
        want no rows. One without tokens has but its place in the ring. Raises ValueError when the
        task's fields don't fit each other.
        """
        task.check()
        operators = self.operators if task.wants_rows else self._kv_only()
        ring = RingAttention(
            task,
            self.pool.storage.flatten(0, 1),
            self.states.plan_block,
            self.model.config.sliding_windows,
        )
        if not len(task.token_ids):
            return self._serve(ring, operators)
        return self._run(self.states.ring(task, ring, self._prefill_scratch), [task], operators)

    def decode(
        self, token_ids: Tensor, positions: Tensor, page_table: Tensor, kv_lens: Tensor
    ) -> Tensor:
        """One token of each of b sequences: writes its KV, attends to all `kv_lens` rows.

        All four lie on the host, where the step is planned: ``token_ids`` int64 [b];
        ``positions`` int64 [b]; ``page_table`` int32 [b, max_pages]; ``kv_lens`` int32 [b], the
        new token included. Returns float32 [b, vocab] on the model's device.
        """

        def embed(x: Tensor) -> None:
            torch.index_select(self._embedding, 0, token_ids.to(self.model.device), out=x)

        state = self._steps.run(embed, token_ids, positions, page_table, kv_lens)
        self.operators[-1].run(state)
        return state.logits

    def mixed(
        self, decodes: DecodeRows, page_table: Tensor, tasks: Sequence[PrefillTask]
    ) -> Tensor:
        """A decode step of b sequences and chunks in one pass: at least one row.

        page_table: int32 [b + chunks, max_pages] on the host, the decodes' rows first. Returns
        float32 [b, vocab] on the model's device; the tasks get theirs. Raises ValueError as
        `prefill_batch` does.
        """
        page_tokens, size = self.pool.layout.page_tokens, len(decodes)
        if tasks or not size:
            check_tasks(tasks, page_tokens)
        tables = mixed_tables(decodes, page_table, tasks, page_tokens, self.remote)
        keeps_all = any(task.want_prompt_logprobs for task in tasks)
        state = self.states.ragged(tables, self._prefill_scratch, is_cut=not keeps_all)
        remote = self._attend_remotely(state, tables)
        wanted = keeps_all or len(tables.rows) > 0
        try:
            for operator in self.operators if wanted else self._kv_only():
                operator.run(state)
        finally:
            state.give_all()
        if remote is not None:
            hand_out_lost(remote.end(), decodes, tasks)
        if not wanted:
            return torch.empty(0, self.model.config.vocab_size, device=self.model.device)
        hand_out(tasks, iter(state.logits[size:]), state.hidden, size)
        return state.logits[:size]

    @property
    def operator_names(self) -> tuple[str, ...]:
        """Of a pass whose rows are wanted, in order."""
        return tuple(operator.name for operator in self.operators)

    def is_attn(self, number: int) -> bool:
        """Whether the operator of this number is an ``attn``."""
        return number < len(self.operators) and self.operators[number].name == "attn"

    def project(self, hidden: Tensor) -> Tensor:
        """float32 [n, vocab]: logits of rows of `PrefillTask.hidden`."""
        return self._lm_head(hidden).float()

    def copy_page(self, source: int, target: int) -> None:
        """`KvPool.copy_page`."""
        self.pool.copy_page(source, target)

    def order(self, names: Sequence[str]) -> None:
        """Nothing to put in order: what is behind its caller, in later stages, is a pipeline's."""

    def drop(self, names: Sequence[str]) -> None:
        """Nothing to give up: likewise."""

    def check_integrity(self) -> None:
        """Nothing stays behind: likewise."""

    def when_fallen(self, call: Callable[[EngineDied], None]) -> None:
        """It is in no other process, and never calls."""

    def rest(self) -> None:
        """Nothing to bring to rest: a group of ranks has."""

    def close(self) -> None:
        """Nothing to end: a group of ranks has."""

    def _run(
        self,
        state: Activations,
        tasks: Sequence[PrefillTask | RingTask],
        operators: Sequence[Operator],
    ) -> Generator[Boundary]:
        try:
            for operator in operators:
                operator.run(state)
                if operator.name == "lm_head":
                    hand_out(tasks, iter(state.logits), state.hidden)
                yield self._boundaries[operator]
        finally:
            state.give_all()

    def _attend_remotely(self, state: Activations, tables: RaggedTables) -> RemoteAttention | None:
        """Begins the holders' part of a pass, where there is one."""
        if tables.remote and self.remote is not None:
            state.remote = RemoteAttention(self.remote.link, tables.remote, tables.slots)
        return state.remote

    def _run_remote(
        self, remote: RemoteAttention, tasks: Sequence[PrefillTask], steps: Generator[Boundary]
    ) -> Generator[Boundary]:
        try:
            yield from steps
        finally:
            hand_out_lost(remote.end(), NO_DECODES, tasks)

    def _serve(self, ring: RingAttention, operators: tuple[Operator, ...]) -> Generator[Boundary]:
        """A pass without tokens."""
        config = self.model.config
        shape = (0, config.num_heads, config.head_dim)
        q_nhd = torch.empty(shape, dtype=self.model.dtype, device=self.model.device)
        for operator in operators:
            if operator.name == "attn":
                ring.run(operator.layer, q_nhd, self.pool.layer(operator.layer), 1.0)
            yield self._boundaries[operator]

    def _kv_only(self) -> tuple[Operator, ...]:
        ends = [i for i, op in enumerate(self.operators) if op.name == "attn"]
        return self.operators[: ends[-1] + 1]


def check_layout(model: Model, pool: KvPool) -> None:
    """Raises ModelError when the pool was made for another model, dtype, heads or layers."""
    config, layout = model.config, pool.layout
    wanted = {
        "num_layers": config.num_layers,
        "num_kv_heads": model.kv_heads.total,
        "head_start": model.kv_heads.start,
        "head_count": model.kv_heads.count,
        "head_dim": config.head_dim,
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    for name, value in wanted.items():
        if getattr(layout, name) != value:
            raise ModelError(f"KV pool: {name} is {getattr(layout, name)}, the model needs {value}")
