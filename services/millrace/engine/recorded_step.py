"""Decode steps made again from their recorded native calls, without the Python of the operators."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from millrace.engine.operators import Activations
from millrace.engine.scratch import Scratch
from millrace_kernels import api as kernels

_CALLS_OF: Final = {"attn": 2}  # rope_write_kv and attention; any other operator makes one call


class RecordedStep:
    """The pass of one batch size between embed and lm_head, on memory of its own.

    Every step of it reads the same page table and lengths, where a `DecodeBatch` changes them.
    """

    def __init__(
        self,
        state: Activations,
        calls: list[kernels.NativeCall],
        embedding: Tensor,
        page_table: Tensor,
        kv_lens: Tensor,
    ) -> None:
        self._state = state
        self._calls = calls
        self._embedding = embedding
        self._tables = (page_table, kv_lens)
        self._made_for = _key(page_table, kv_lens)

    def fits(self, page_table: Tensor, kv_lens: Tensor) -> bool:
        """Whether these are the tables, of the same size and at the same place."""
        return _key(page_table, kv_lens) == self._made_for

    def scratch(self) -> Scratch | None:
        """The memory it worked on, for another: it is not run any more."""
        self._state.give_all()
        return self._state.scratch

    def run(self, token_ids: Tensor, slots: Tensor, cos: Tensor, sin: Tensor) -> Activations:
        """The pass up to lm_head; what it returns holds until the next run."""
        state = self._state
        state.slots.copy_(slots)
        state.cos.copy_(cos)
        state.sin.copy_(sin)
        torch.index_select(self._embedding, 0, token_ids, out=state.residual)
        for call in self._calls:
            call()
        return state


def is_whole(
    calls: list[kernels.NativeCall], operators: list[str], state: Activations, embedded: Tensor
) -> bool:
    """Whether the calls of one pass are all that its operators did.

    Experts, and what torch computes, leave none. The residual begins where the embedding lies.
    """
    wanted = len(state.plans) + sum(_CALLS_OF.get(name, 1) for name in operators)
    return len(calls) == wanted and state.residual is embedded


def _key(page_table: Tensor, kv_lens: Tensor) -> tuple[object, ...]:
    threads = torch.get_num_threads()  # a call is recorded with as many
    return page_table.data_ptr(), page_table.shape, kv_lens.data_ptr(), threads
