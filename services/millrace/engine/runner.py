"""The interface of a model that is ready to compute, on however many processes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Protocol

from torch import Tensor

from millrace.engine.attention.kvp_owner import Remote
from millrace.engine.attention.ring import RingTask
from millrace.engine.forward.mixed_pass import DecodeRows
from millrace.engine.forward.pass_states import PassStates
from millrace.engine.forward.passes import Boundary, Processes
from millrace.engine.forward.prefill_task import PrefillTask
from millrace.engine.kv.page_table import PageTable
from millrace.engine.kv.pool import KvPool
from millrace.engine.model.loader import Model
from millrace.engine.pipeline.in_flight import InFlight


class Runner(Protocol):
    """A model bound to a KV pool: `ModelRunner` in one stage, `PipelineRunner` in several.

    One thread at a time calls it. Several prefills may be suspended at a time. Any call may raise
    EngineDied: a process that computes with this one has died, and the runner can't be used again.
    """

    remote: Remote | None
    """The way to the KVP workers of spread requests. The caller sets it, between passes."""
    model: Model  # the part of this process: rank 0 of the first stage
    pool: KvPool  # the record of all pages; its tensor is that of rank 0
    storage: Tensor
    """[pools, layers, pages, 2, k, page_tokens, d]: the KV of all layers, and of all ranks whose
    memory this process maps, in the order of their heads. `pool` has the first."""
    states: PassStates  # of this process

    @property
    def in_flight(self) -> InFlight | None:
        """Returns the passes in later stages, also of ended generators; None in one stage."""

    @property
    def processes(self) -> Processes | None:
        """Returns the other processes that compute with this one; None if there are none."""

    def prefill_batch(self, tasks: Sequence[PrefillTask]) -> Generator[Boundary]:
        """Computes a ragged batch of chunks, yielding after every operator.

        At any boundary the caller may end the generator (`close()`), or leave it suspended, run
        other generators, and resume it. The KV of a layer is in its pages once the layer's ``attn``
        was yielded; for a layer of a later stage, when the tasks' `on_layer` is called. Rows that
        no task wants are not computed: without logits the pass ends at the last layer's ``attn``.
        In several stages the generator ends when the next pass may begin; if rows are wanted, it
        first yields a boundary with `awaited`. Raises ValueError if a task has no tokens or too few
        pages.
        """

    def prefill_ring(self, task: RingTask) -> Generator[Boundary]:
        """Computes a member's part of a pass of an SP group; yields as `prefill_batch` does.

        All members yield the same boundaries up to the last layer's ``attn``. There the pass ends
        at members that want no rows. A member without tokens only forwards blocks of the ring. The
        caller's thread uses the task's link. Raises ValueError if the task's fields don't fit each
        other, or if ranks on CUDA would have to take part in a ring.
        """

    def decode(
        self, token_ids: Tensor, positions: Tensor, page_table: Tensor, kv_lens: Tensor
    ) -> Tensor:
        """Computes one token of each of b sequences: writes its KV, attends to `kv_lens` rows.

        All four tensors are on the host, where the step is planned: ``token_ids`` int64 [b];
        ``positions`` int64 [b]; ``page_table`` int32 [b, max_pages]; ``kv_lens`` int32 [b], the
        new token included. Returns logits, float32 [b, vocab], on the model's device.
        """

    def mixed(
        self, decodes: DecodeRows, page_table: Tensor, tasks: Sequence[PrefillTask]
    ) -> Tensor:
        """Computes a decode step of b sequences and chunks in one pass: at least one row.

        page_table: int32 [b + chunks, max_pages] on the host, the decodes' rows first. Returns the
        decodes' logits, float32 [b, vocab], on the model's device; each task gets its own rows.
        Raises ValueError as `prefill_batch` does.
        """

    def follow(self, page_table: PageTable) -> None:
        """Prepares decode steps over the first rows of this page table, and captures the CUDA
        graphs of steps if the engine uses any. Called once, before the first step."""

    def capture_prefills(self) -> None:
        """Captures the CUDA graphs of short prefills if the engine uses any. An instance that
        prefills calls it before its first request; a second call does nothing."""

    def project(self, hidden: Tensor) -> Tensor:
        """Returns the logits of rows of `PrefillTask.hidden`, float32 [n, vocab]."""

    def copy_page(self, source: int, target: int) -> None:
        """Copies a page, as `KvPool.copy_page` does, at every stage and rank."""
