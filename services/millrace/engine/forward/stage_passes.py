"""The passes of one stage in one process: all operators of the model where it is the only stage."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from millrace.core.errors import ModelError
from millrace.core.kv.layout import KvLayout
from millrace.engine.attention.kvp_owner import RemoteAttention, RemoteLink
from millrace.engine.attention.ring import RingAttention, RingTask
from millrace.engine.device.graph_sizes import NO_GRAPHS, GraphSizes
from millrace.engine.forward.device_steps import DeviceSteps
from millrace.engine.forward.mixed_pass import RaggedTables
from millrace.engine.forward.pass_states import PassStates
from millrace.engine.forward.passes import Boundary, Fetch, Finish
from millrace.engine.forward.prefill_graphs import GraphPass, PrefillGraphs, Step
from millrace.engine.forward.recorded_step import KeptTables, RecordedSteps
from millrace.engine.kv.page_table import PageTable
from millrace.engine.kv.pool import KvPool
from millrace.engine.model.communicator import Communicator, SplitHead
from millrace.engine.model.loader import Model
from millrace.engine.model.operators import (
    ATTN_ROWS,
    Activations,
    Head,
    build_operators,
    required,
    whole,
)
from millrace.engine.model.scratch import Scratch
from millrace.engine.model.stage import ALONE, Stage
from millrace_kernels import api as kernels


class StagePasses:
    """`Passes` of one rank: a stage's layers, or its share of them, bound to their KV's pool."""

    processes = None

    def __init__(
        self,
        model: Model,
        pool: KvPool,
        attention_backend: str = "auto",
        *,
        stage: Stage = ALONE,
        memory: Tensor | None = None,
        ranks: Communicator | None = None,
        graphs: GraphSizes = NO_GRAPHS,
    ) -> None:
        """`pool`: of the stage's layers; see `stage_pool`. `memory`: that of all layers of the
        whole model, [layers, pages, ...], in which the ring's buffers lie; None: they lie in the
        pool.
        `ranks`: those with which the stage is shared, which must all make the same calls.
        `graphs`: the CUDA graphs to capture, see `graph_sizes`.

        Raises ModelError when the pool was made for another model, dtype or share of its heads.
        """
        check_layout(model, pool)
        self.model = model
        self.stage = stage
        self.pool = pool
        self.storage = pool.storage[None]
        self.states = PassStates(model, pool.layout, attention_backend)
        self._memory = (pool.storage if memory is None else memory).flatten(0, 1)
        self._lm_head = _head(model, ranks) if stage.is_first else None
        is_alone = stage == ALONE
        self.operators = build_operators(
            model.config,
            model.weights,
            [pool.layer(i) for i in range(model.config.num_layers)],
            self._lm_head if is_alone else None,
            whole if ranks is None else ranks.all_reduce,
        )
        self._after_layers = self.operators[-1:] if is_alone else ()
        layers = self.operators[stage.is_first : len(self.operators) - len(self._after_layers)]
        # Collectives leave no native calls to make again.
        self._steps = RecordedSteps(model, self.states, layers, records=ranks is None)
        is_host = model.device.type == "cpu"
        records = ranks is None and is_host and not is_alone
        self._tables = KeptTables() if records else None
        start = model.layers.start
        self._all_steps = [
            Step(op.run, Boundary(op.layer if op.name == "embed" else start + op.layer, op.name))
            for op in self.operators
        ]
        attns = [i for i, op in enumerate(self.operators) if op.name == "attn"]
        self._kv_steps = attns[-1] + 1  # up to the last layer's attention
        # On other devices torch's allocator keeps memory itself.
        self.scratch = Scratch(model.dtype) if is_host else None
        self._graph_sizes = graphs
        self.device_steps: DeviceSteps | None = None
        self._prefill_graphs: PrefillGraphs | None = None
        if is_alone and not is_host:
            self.device_steps = DeviceSteps(model, self.states, self.operators)
            self._prefill_graphs = PrefillGraphs(model, self.states, self.operators)

    def run(
        self,
        tables: RaggedTables,
        *,
        is_cut: bool,
        kv_only: bool,
        fetch: Fetch | None,
        finish: Finish,
        remote: RemoteAttention | None = None,
    ) -> Generator[Boundary]:
        """`Passes.run`."""
        if self._tables is not None and tables.is_step:
            return self._step(self._tables, tables, fetch, finish)
        is_last = self.stage.is_last
        state = self.states.ragged(tables, self.scratch, is_cut=is_cut and is_last)
        state.remote = remote
        steps = self._kv_only() if kv_only and is_last else self._all_steps
        graphs = self._prefill_graphs
        by = None if graphs is None else graphs.begin(tables, state)
        if by is not None:
            steps = [steps[0], *by.steps(), *steps[self._kv_steps :]]
        return self._run(state, steps, fetch, finish, by)

    def ring(self, task: RingTask, *, fetch: Fetch | None, finish: Finish) -> Generator[Boundary]:
        """`Passes.ring`."""
        is_last = self.stage.is_last
        windows = self.model.config.sliding_windows
        ring = RingAttention(
            task, self._memory, self.states.plan_block, windows, to_the_end=is_last
        )
        steps = self._kv_only() if is_last and not task.wants_rows else self._all_steps
        if not len(task.token_ids):
            return self._serve(ring, steps)
        if self._prefill_graphs is not None:
            self._prefill_graphs.count_eager("ring")
        return self._run(self.states.ring(task, ring, self.scratch), steps, fetch, finish)

    def decode(
        self, token_ids: Tensor, positions: Tensor, page_table: Tensor, kv_lens: Tensor
    ) -> Activations:
        """`Passes.decode`."""
        if self.device_steps is not None:
            return self.device_steps.run(token_ids, positions, page_table, kv_lens)
        begin = self._embed(token_ids)
        state = self._steps.run(begin, token_ids, positions, page_table, kv_lens)
        for operator in self._after_layers:
            operator.run(state)
        return state

    def follow(self, page_table: PageTable) -> None:
        """`Passes.follow`."""
        self.states.page_table = page_table
        if self.device_steps is not None and self._graph_sizes.batches:
            self.device_steps.capture(self._graph_sizes, page_table)

    def capture_prefills(self) -> None:
        """`Passes.capture_prefills`."""
        if self._prefill_graphs is not None:
            self._prefill_graphs.capture(self._graph_sizes.rows)

    def shared(self, link: RemoteLink) -> RemoteLink:
        """Returns the link itself: there is no other rank."""
        return link

    def project(self, hidden: Tensor) -> Tensor:
        """`Runner.project`, at the first stage."""
        return required(self._lm_head)(hidden).float()

    def copy_page(self, source: int, target: int) -> None:
        """`Passes.copy_page`."""
        self.pool.copy_unchecked(source, target)

    def is_attn(self, number: int) -> bool:
        """Returns whether the operator of this number is an ``attn``."""
        return number < len(self.operators) and self.operators[number].name == "attn"

    def _step(
        self, kept: KeptTables, tables: RaggedTables, fetch: Fetch | None, finish: Finish
    ) -> Generator[Boundary]:
        """Computes a decode step at once: it is short, and goes before other passes anyway."""
        begin = fetch or self._embed(tables.token_ids)
        held = kept.hold(tables.page_table, tables.kv_lens)
        finish(self._steps.run(begin, tables.token_ids, tables.positions, *held))
        for step in self._all_steps:  # also for a prompt of one row, which reports layers
            yield step.boundary

    def _run(
        self,
        state: Activations,
        steps: Sequence[Step],
        fetch: Fetch | None,
        finish: Finish,
        by: GraphPass | None = None,
    ) -> Generator[Boundary]:
        resume, end = (_nothing, _nothing) if by is None else (by.resume, by.end)
        last = steps[-1]
        try:
            if fetch is not None:
                state.x = state.room(self.model.config.hidden_size, self.model.dtype)
                fetch(state.x)
            for step in steps:
                resume()
                step.run(state)
                while state.rest:
                    state.rest.popleft()()
                    if state.rest:
                        yield Boundary(step.boundary.layer, ATTN_ROWS)
                        resume()
                if step is last and step.boundary.operator != "attn":
                    finish(state)
                yield step.boundary
        finally:
            end()
            state.give_all()

    def _serve(self, ring: RingAttention, steps: Sequence[Step]) -> Generator[Boundary]:
        """Takes this member's place in the ring, without tokens."""
        model, heads = self.model, self.model.config.num_heads
        shape = (0, heads, model.config.head_dim)
        q_nhd = torch.empty(shape, dtype=model.dtype, device=model.device)
        for operator, step in zip(self.operators, steps, strict=False):
            if operator.name == "attn":
                ring.run(operator.layer, q_nhd, self.pool.layer(operator.layer), 1.0)
            yield step.boundary

    def _embed(self, token_ids: Tensor) -> Fetch:
        def embed(x: Tensor) -> None:
            embedding = required(self.model.weights.embedding)
            torch.index_select(embedding, 0, token_ids.to(self.model.device), out=x)

        return embed

    def _kv_only(self) -> list[Step]:
        return self._all_steps[: self._kv_steps]


def _nothing() -> None:
    """Keeps no memory between the steps of a pass."""


def stage_pool(model: Model, layout: KvLayout, memory: Tensor | None = None) -> KvPool:
    """Makes the pool of a stage's layers. `layout`: of all layers of the whole model, as memory
    [layers, pages, ...]; None: the pool takes memory of its own."""
    layers = model.layers
    part = replace(layout, num_layers=len(layers), layer_start=layers.start)
    own = None if memory is None else memory[layers.start : layers.stop]
    return KvPool(part, model.device, own)


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


def _head(model: Model, ranks: Communicator | None) -> Head:
    head = kernels.prepare_linear(required(model.weights.lm_head))
    return head if ranks is None else SplitHead(head, ranks, model.config.vocab_size)
