"""Repeats decode steps from recorded native calls, without the Python of the operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

from millrace.engine.forward.pass_states import PassStates
from millrace.engine.model.loader import Model
from millrace.engine.model.operators import Activations, Operator
from millrace.engine.model.scratch import Scratch
from millrace_kernels import api as kernels

MOST_RECORDED: Final = 16
"""Batch sizes whose step is kept recorded."""

Begin = Callable[[Tensor], None]
"""Writes what a step begins with, [b, H]: embedded tokens, or rows of the stage before."""

_CALLS_OF: Final = {"attn": 2}  # rope_write_kv and attention; any other operator makes one call


class RecordedSteps:
    """Decode steps over the layers of a stage. Each batch size is recorded when it first comes."""

    def __init__(
        self, model: Model, states: PassStates, operators: Sequence[Operator], *, records: bool
    ) -> None:
        """operators: of the layers.

        `records`: False where operators do work that no native call records.
        """
        self._model = model
        self._states = states
        self._operators = operators
        self._names = [operator.name for operator in operators]
        self._records = records
        self._recorded: dict[int, RecordedStep] = {}  # by sequences of a step
        self._scratch = self._new_scratch()

    def run(
        self,
        begin: Begin,
        token_ids: Tensor,
        positions: Tensor,
        page_table: Tensor,
        kv_lens: Tensor,
    ) -> Activations:
        """Runs one step; arguments as of `Runner.decode`. The result holds until the next step."""
        recorded = self._recorded.get(len(positions))
        if recorded is None or not recorded.fits(page_table, kv_lens):
            return self._run_operators(begin, token_ids, positions, page_table, kv_lens)
        slots = self._states.slots(positions, page_table)
        cos, sin = self._states.rotary(positions.to(self._model.device))
        return recorded.run(begin, slots, cos, sin)

    def _run_operators(
        self,
        begin: Begin,
        token_ids: Tensor,
        positions: Tensor,
        page_table: Tensor,
        kv_lens: Tensor,
    ) -> Activations:
        """Runs the step operator by operator, and records the calls where possible."""
        size = len(positions)
        outdated = self._recorded.pop(size, None)
        scratch = self._scratch if outdated is None else outdated.scratch()
        with kernels.record() as calls:
            state = self._states.decode(token_ids, positions, page_table, kv_lens, scratch)
            state.x = begun = state.room(self._model.config.hidden_size, self._model.dtype)
            begin(begun)
            for operator in self._operators:
                operator.run(state)
        if self._records and is_whole(calls, self._names, state, begun):
            if len(self._recorded) == MOST_RECORDED:
                del self._recorded[next(iter(self._recorded))]  # the oldest
            self._recorded[size] = RecordedStep(state, calls, page_table, kv_lens)
            if state.scratch is self._scratch:
                self._scratch = self._new_scratch()  # the old one is the step's now
        else:
            state.give_all()  # reading the sums takes no memory
        return state

    def _new_scratch(self) -> Scratch | None:
        # On other devices torch's allocator keeps memory itself.
        return Scratch(self._model.dtype) if self._model.device.type == "cpu" else None


class RecordedStep:
    """The recorded step of one batch size, on memory of its own.

    Every run reads the same page table and lengths, whose contents change.
    """

    def __init__(
        self,
        state: Activations,
        calls: list[kernels.NativeCall],
        page_table: Tensor,
        kv_lens: Tensor,
    ) -> None:
        self._state = state
        self._calls = calls
        self._tables = (page_table, kv_lens)
        self._made_for = _key(page_table, kv_lens)

    def fits(self, page_table: Tensor, kv_lens: Tensor) -> bool:
        """Returns whether these are the recorded tables, of the same size and address."""
        return _key(page_table, kv_lens) == self._made_for

    def scratch(self) -> Scratch | None:
        """Returns the step's memory for another step. This step must not run again."""
        self._state.give_all()
        return self._state.scratch

    def run(self, begin: Begin, slots: Tensor, cos: Tensor, sin: Tensor) -> Activations:
        """Runs the step. The result holds until the next run."""
        state = self._state
        state.slots.copy_(slots)
        state.cos.copy_(cos)
        state.sin.copy_(sin)
        assert state.residual is not None  # which begins where the step does, see `is_whole`
        begin(state.residual)
        for call in self._calls:
            call()
        return state


class KeptTables:
    """Keeps page tables and lengths of steps at one address for each batch size, as recorded steps
    need, where every step comes with new tables."""

    def __init__(self) -> None:
        self._kept: dict[int, tuple[Tensor, Tensor]] = {}

    def hold(self, page_table: Tensor, kv_lens: Tensor) -> tuple[Tensor, Tensor]:
        """Copies both. Returns int32 [b, at least as wide] and [b]."""
        size, width = page_table.shape
        kept = self._kept.get(size)
        if kept is None or kept[0].shape[1] < width:
            room = torch.zeros(size, 1 << (width - 1).bit_length(), dtype=torch.int32)
            kept = self._kept[size] = room, torch.empty(size, dtype=torch.int32)
        kept[0][:, :width] = page_table
        kept[1].copy_(kv_lens)
        return kept


def is_whole(
    calls: list[kernels.NativeCall], operators: list[str], state: Activations, begun: Tensor
) -> bool:
    """Returns whether the calls of one step are all work of its operators.

    Experts and torch's own operators record no call. The residual lies where the step has `begun`.
    """
    wanted = len(state.plans) + sum(_CALLS_OF.get(name, 1) for name in operators)
    return len(calls) == wanted and state.residual is begun


def _key(page_table: Tensor, kv_lens: Tensor) -> tuple[object, ...]:
    threads = torch.get_num_threads()  # a call is recorded with as many
    return page_table.data_ptr(), page_table.shape, kv_lens.data_ptr(), threads
