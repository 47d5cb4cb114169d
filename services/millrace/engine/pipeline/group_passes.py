"""The passes of a stage whose layers are split over ranks: tensor parallelism inside a stage.

Rows that the stage before hands on come to rank 0, which broadcasts them. The all-reduces of a
layer make its sums whole on every rank, so rank 0 alone hands rows on; it alone has links, too.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace

from torch import Tensor

from millrace.core.kv.layout import KvLayout
from millrace.engine.attention.kvp_owner import RemoteAttention, RemoteLink
from millrace.engine.attention.ring import RingTask
from millrace.engine.forward.local_runner import Boundary
from millrace.engine.forward.mixed_pass import RaggedTables
from millrace.engine.forward.stage_passes import Fetch, HandOn, StagePasses
from millrace.engine.model.loader import Model
from millrace.engine.model.stage import Stage
from millrace.engine.parallel.commands import Open, RingPass, StagePass, Tables
from millrace.engine.parallel.kv_memory import mapped, rank_layouts
from millrace.engine.parallel.kvp_links import SharedRemote
from millrace.engine.parallel.lockstep import Lockstep
from millrace.engine.parallel.rank_group import RankGroup
from millrace.engine.parallel.ring_links import SharedLink
from millrace_kernels.plan import Backend


class GroupPasses:
    """`Passes` of the ranks of a group. RankError, from whichever call meets it, ends the group."""

    def __init__(
        self,
        group: RankGroup,
        model: Model,
        stage: Stage,
        layout: KvLayout,
        handle: int,
        attention_backend: str = "auto",
    ) -> None:
        """`model`: of `load_ranks`. `layout`: of rank 0's pool, of all layers of the model.
        `handle`: of the instance's memory (`new_memory`); the caller closes it.

        Raises ModelError as `StagePasses` does.
        """
        self.model = model
        self.stage = stage
        self._group = group
        self._lockstep = Lockstep(group)
        storage = mapped(layout, handle)
        self._lockstep.tell(
            Open(layouts=rank_layouts(layout, group.size), attention_backend=attention_backend)
        )
        group.hand_over(handle)
        self._storage = storage[:, model.layers.start : model.layers.stop]
        self._own = StagePasses(model, stage, layout, storage[0], attention_backend, group.ranks)

    def attention_backend(self) -> Backend:
        """`PassStates.attention_backend`."""
        return self._own.attention_backend()

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
        """`Passes.run`, suspended as in `Lockstep.run`."""
        steps = self._own.run(
            tables,
            is_cut=is_cut,
            kv_only=kv_only,
            fetch=self._for_all(fetch),
            hand_on=hand_on,
            remote=remote,
        )
        return self._lockstep.run(
            steps, lambda: StagePass(tables=Tables.of(tables), is_cut=is_cut, kv_only=kv_only)
        )

    def ring(self, task: RingTask, *, fetch: Fetch | None, hand_on: HandOn) -> Generator[Boundary]:
        """`Passes.ring`, suspended as in `Lockstep.run`."""
        link = SharedLink(self._group.ranks, task.link, task.link.rank, task.link.size)
        # The caller makes other stages' calls by the task's own link.
        shared = replace(task, link=link)
        steps = self._own.ring(shared, fetch=self._for_all(fetch), hand_on=hand_on)
        return self._lockstep.run(steps, lambda: RingPass.of(task), self._own.is_attn)

    def shared(self, link: RemoteLink) -> RemoteLink:
        """The link, for a pass of all ranks."""
        return SharedRemote(self._group.ranks, link, self._storage)

    def project(self, hidden: Tensor) -> Tensor:
        """`ModelRunner.project`, at the first stage."""
        return self._lockstep.project(hidden, self._own.project)

    def rest(self) -> None:
        """`Lockstep.rest`."""
        self._lockstep.rest()

    def close(self) -> None:
        """Ends the other ranks. Passes that were left are lost."""
        self._lockstep.close()

    def _for_all(self, fetch: Fetch | None) -> Fetch | None:
        if fetch is None:
            return None

        def fetch_for_all(memory: Tensor) -> None:
            fetch(memory)
            self._group.ranks.broadcast(memory)

        return fetch_for_all
