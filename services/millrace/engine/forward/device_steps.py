"""Decode steps on a GPU: CUDA graphs of a few batch sizes, and operator by operator where no graph
fits.

A graph has a number of rows and of attention's work items; a step takes the smallest graph into
which it fits, and its remaining rows are padding, whose K/V goes nowhere. A step writes all its
tables into one buffer, which one copy brings to the memory that the graphs read. The page table
follows by its own changes (`PageTable`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Final

import torch
from torch import Tensor

from millrace.core.errors import ConfigError
from millrace.engine.device.graph_sizes import GraphSizes
from millrace.engine.device.graphs import Graph, Graphs
from millrace.engine.forward.pass_states import PassStates
from millrace.engine.kv.page_table import PageTable
from millrace.engine.kv.step_tables import NOWHERE
from millrace.engine.model.loader import Model
from millrace.engine.model.operators import Activations, Operator
from millrace_kernels.step_attention import Room, StepAttention, StepWork

log = logging.getLogger(__name__)

_GROWTH: Final = 4
"""How many times the work items of a graph the next larger graph of its batch size has."""


class DeviceSteps:
    """The decode steps of a model in one stage on a CUDA device."""

    def __init__(self, model: Model, states: PassStates, operators: Sequence[Operator]) -> None:
        """operators: of the whole model."""
        self._model = model
        self._states = states
        self._operators = operators
        self._graphs: _StepGraphs | None = None
        self._without = "off"

    def capture(self, sizes: GraphSizes, table: PageTable) -> None:
        """Captures the graphs, for steps over the first rows of `table`.

        Where that fails, steps run operator by operator, and the log says why; raises ConfigError
        if the graphs are required.
        """
        try:
            self._graphs = _StepGraphs(self._model, self._states, self._operators, sizes, table)
        except Exception as error:  # any error of CUDA, of its memory, of Triton
            if sizes.is_required:
                raise ConfigError(
                    f"engine.cuda_graphs is 'on', but the capture of decode steps failed: {error}"
                ) from error
            self._graphs, self._without = None, "failed"
            log.warning("decode runs without CUDA graphs: their capture failed: %s", error)

    def run(
        self, token_ids: Tensor, positions: Tensor, page_table: Tensor, kv_lens: Tensor
    ) -> Activations:
        """Runs one step; arguments as of `Runner.decode`. The result holds until the next step."""
        reason = self._without
        if self._graphs is not None:
            found = self._graphs.find(page_table, kv_lens)
            if not isinstance(found, str):
                self._states.steps.graph += 1
                graph, works = found
                return graph.run(
                    token_ids, positions, self._states.slots(positions, page_table), works
                )
            reason = found
        self._states.steps.eager[reason] += 1
        state = self._states.decode(token_ids, positions, page_table, kv_lens, None)
        for operator in self._operators:
            operator.run(state)
        return state


class _StepGraphs:
    """The graphs of all sizes, and the memory that they share."""

    def __init__(
        self,
        model: Model,
        states: PassStates,
        operators: Sequence[Operator],
        sizes: GraphSizes,
        table: PageTable,
    ) -> None:
        self._table = table
        self._copy = table.fix(states.pages_of(sizes.context_tokens))
        self._attention = {
            window: StepAttention(plan) for window, plan in states.step_plans().items()
        }
        rooms = self._rooms(sizes)
        most = rooms[0]
        config, device = model.config, model.device
        words = 6 * most.rows + len(self._attention) * most.words
        tables = torch.zeros(words, dtype=torch.int32, device=device)
        shape = (most.items, config.num_heads, config.head_dim)
        parts = [torch.zeros(s, dtype=torch.float32, device=device) for s in (shape, shape[:2])]
        graphs = Graphs()
        self._graphs: dict[int, list[_StepGraph]] = {}
        for room in rooms:  # the largest first
            bound = _Bound(room, tables, self._attention, self._copy, parts)
            tables.zero_()
            bound.slots.fill_(NOWHERE)  # a capture runs the step once
            graph = _StepGraph(bound, graphs.capture(partial(bound.step, states, operators)))
            self._graphs.setdefault(room.rows, []).insert(0, graph)

    def find(
        self, page_table: Tensor, kv_lens: Tensor
    ) -> tuple[_StepGraph, Sequence[StepWork]] | str:
        """Returns the smallest graph for a step and the step's work by window; else the reason."""
        copy = self._table.copy_of(page_table)
        if copy is None or copy.data_ptr() != self._copy.data_ptr():
            return "page_table"
        rows = min((r for r in self._graphs if r >= len(kv_lens)), default=None)
        if rows is None:
            return "batch"
        works = [attention.work(kv_lens) for attention in self._attention.values()]
        items = max(len(work.items) for work in works)
        fitting = (graph for graph in self._graphs[rows] if graph.room.items >= items)
        graph = next(fitting, None)
        return "context" if graph is None else (graph, works)

    def _rooms(self, sizes: GraphSizes) -> list[Room]:
        """Returns the sizes of all graphs, the largest first."""
        each = max(one.most_items(sizes.context_tokens) for one in self._attention.values())
        factors = [1]
        while factors[-1] < each:
            factors.append(min(factors[-1] * _GROWTH, each))
        return [Room(rows, rows * k) for rows in reversed(sizes.batches) for k in reversed(factors)]


class _Bound:
    """One graph's views of the shared memory: where a step's tables are."""

    def __init__(
        self,
        room: Room,
        tables: Tensor,
        attention: dict[int | None, StepAttention],
        page_table: Tensor,
        partial: Sequence[Tensor],
    ) -> None:
        self.room = room
        self.tables = tables[: 6 * room.rows + len(attention) * room.words]
        wide = self.tables[: 6 * room.rows].view(torch.int64)
        self.token_ids, self.positions, self.slots = wide.view(3, room.rows)
        self.plans = {
            window: one.bind(room, part, page_table, partial)
            for (window, one), part in zip(
                attention.items(), self.tables[6 * room.rows :].view(-1, room.words), strict=True
            )
        }

    def step(self, states: PassStates, operators: Sequence[Operator]) -> Activations:
        """Computes a step of these tables, operator by operator."""
        state = states.of_step(self.token_ids, self.positions, self.slots, self.plans)
        for operator in operators:
            operator.run(state)
        return state


class _StepGraph:
    """The graph of one size."""

    def __init__(self, bound: _Bound, graph: Graph[Activations]) -> None:
        self.room = bound.room
        self._bound = bound
        self._graph = graph
        self._logits = graph.result.logits

    def run(
        self, token_ids: Tensor, positions: Tensor, slots: Tensor, works: Sequence[StepWork]
    ) -> Activations:
        """Runs a step of b sequences: int64 [b] each, and the work of each window."""
        size, room, bound = len(positions), self.room, self._bound
        host = torch.empty(bound.tables.shape, dtype=torch.int32, pin_memory=True)
        wide = host[: 6 * room.rows].view(torch.int64).view(3, room.rows)
        wide[:2] = 0
        wide[2] = NOWHERE
        is_fed = token_ids.device.type != "cpu"  # the device has chosen the tokens itself
        if not is_fed:
            wide[0, :size] = token_ids
        wide[1, :size], wide[2, :size] = positions, slots
        words = host[6 * room.rows :].numpy().reshape(len(works), room.words)
        for work, into in zip(works, words, strict=True):
            work.write(room, into)
        bound.tables.copy_(host, non_blocking=True)
        if is_fed:
            bound.token_ids[:size].copy_(token_ids)
        self._graph.replay()
        state = self._graph.result
        state.logits = self._logits[:size]
        return state
