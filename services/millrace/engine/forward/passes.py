"""Passes over the layers of one stage, whether one process has the layers or ranks share them.

A runner (`millrace.engine.runner`) makes passes of requests' tasks; `Passes` computes them.
Between two stages goes the sum of the last layer's output and the residual before it, [rows, H] of
the model's dtype: all that the next layer begins with. Shape letters are those of
`millrace.engine.model.operators`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from millrace.engine.attention.kvp_owner import RemoteAttention, RemoteLink
from millrace.engine.attention.ring import RingTask
from millrace.engine.completion import Completion
from millrace.engine.errors import EngineDied
from millrace.engine.forward.mixed_pass import RaggedTables
from millrace.engine.forward.pass_states import PassStates
from millrace.engine.kv.page_table import PageTable
from millrace.engine.kv.pool import KvPool
from millrace.engine.model.loader import Model
from millrace.engine.model.operators import Activations
from millrace.engine.model.stage import Stage

Fetch = Callable[[Tensor], None]
"""Writes the rows that the stage before has handed on into memory [n, H]."""
Finish = Callable[[Activations], None]
"""Reads the activations after the stage's last operator: `x` and `residual`, whose sum the next
stage begins with, or, of a model in one stage, `logits` and `hidden`."""


@dataclass(frozen=True, slots=True)
class Boundary:
    """A point between two operators, which the engine's generator yields, named by the operator
    that has just run; or a point within a long ``attn``, named `operators.ATTN_ROWS`.

    After a CUDA graph `together` has the names of all operators since the boundary before it.
    ``layer`` is -1 after ``embed`` and `num_layers` after ``lm_head``. With `awaited` the pass is
    in later stages of a pipeline, and its generator can't continue before `awaited` is set.
    """

    layer: int
    operator: str
    awaited: Completion | None = None
    together: tuple[str, ...] = ()


class Processes(Protocol):
    """The other processes that compute a runner's passes: ranks, later stages."""

    def rest(self) -> None:
        """Brings all ranks to a boundary on which they agree. A caller that suspends a pass and
        calls nothing else for longer than a collective may wait must call `rest`."""

    def when_died(self, call: Callable[[EngineDied], None]) -> None:
        """Has `call` made, on any thread, when one of the processes has died."""

    def close(self) -> None:
        """Ends the processes. Suspended passes are lost."""


class Passes(Protocol):
    """The interface that computes passes over one stage's layers. One thread at a time uses it.

    EngineDied, from any call, is the end of the stage.
    """

    model: Model  # rank 0's part
    stage: Stage
    pool: KvPool  # of the stage's layers, rank 0's heads
    storage: Tensor
    """[pools, layers, pages, 2, k, page_tokens, d]: the KV of all ranks whose memory this process
    maps, in the order of their heads; on CUDA rank 0's alone."""
    states: PassStates  # rank 0's

    @property
    def processes(self) -> Processes | None:
        """None where this process computes alone."""

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
        """Computes a ragged batch of rows, yielding after every operator, and within long ones.

        The KV of a layer is in its pages once the layer's ``attn`` was yielded. `fetch`: None at
        the first stage, which embeds. At the last stage `is_cut` computes the wanted rows alone
        after the last layer's attention, and with `kv_only` the pass ends at the last ``attn``
        and never calls `finish`. `remote`: for rows that attend to other instances' KV, over
        a link of `shared`.
        """

    def ring(self, task: RingTask, *, fetch: Fetch | None, finish: Finish) -> Generator[Boundary]:
        """Computes the stage's part of `Runner.prefill_ring`; the link counts the stage's layers.

        Calls neither `fetch` nor `finish` for a task without tokens; the last stage calls `finish`
        only where the task wants rows. Raises ValueError where ranks can't take part in a ring.
        """

    def decode(
        self, token_ids: Tensor, positions: Tensor, page_table: Tensor, kv_lens: Tensor
    ) -> Activations:
        """Computes a decode step at the first stage; arguments as of `Runner.decode`. Returns the
        activations after the last operator, which hold until the next step."""

    def follow(self, page_table: PageTable) -> None:
        """`Runner.follow`, at the first stage."""

    def capture_prefills(self) -> None:
        """`Runner.capture_prefills`, at the first stage."""

    def shared(self, link: RemoteLink) -> RemoteLink:
        """The link as `run` takes it: all ranks make the same calls of it."""

    def project(self, hidden: Tensor) -> Tensor:
        """`Runner.project`, at the first stage."""

    def copy_page(self, source: int, target: int) -> None:
        """Copies a page at every rank of the stage; returns when all have. The caller's record of
        pages has holders for both."""
