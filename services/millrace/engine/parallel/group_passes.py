"""The passes of a stage whose layers are split over ranks: tensor parallelism inside a stage.

All ranks run their parts in `Lockstep`. Rows that the stage before hands on come to rank 0, which
broadcasts them. The all-reduces of a layer make its sums whole on every rank, so rank 0 alone hands
rows on, and only rank 0 has links to other instances.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final

from torch import Tensor

from millrace.core.kv.layout import KvLayout
from millrace.engine.attention.kvp_owner import RemoteAttention, RemoteLink
from millrace.engine.attention.ring import RingTask
from millrace.engine.forward.mixed_pass import RaggedTables
from millrace.engine.forward.passes import Boundary, Fetch, Finish
from millrace.engine.forward.stage_passes import StagePasses, stage_pool
from millrace.engine.kv.page_table import PageTable, TableMirror
from millrace.engine.model.config import ModelConfig
from millrace.engine.model.loader import Model, load_model
from millrace.engine.model.operators import Activations
from millrace.engine.model.stage import ALONE, Stage
from millrace.engine.model.tp_shard import TpShard
from millrace.engine.parallel.commands import (
    CopyPage,
    Decode,
    Instruction,
    Load,
    Open,
    RingPass,
    StagePass,
)
from millrace.engine.parallel.kv_memory import copies_of, mapped, rank_layouts
from millrace.engine.parallel.links.kvp import GatheredKv, MappedKv, NewKv, SharedRemote
from millrace.engine.parallel.links.ring import SharedLink
from millrace.engine.parallel.lockstep import Lockstep
from millrace.engine.parallel.rank_group import RankGroup
from millrace.model_folder import resolve_model
from millrace_kernels.determinism import Alike

_LOAD_TIMEOUT_S: Final = 3600.0


def load_ranks(
    group: RankGroup,
    model: str | Path,
    *,
    dtype: str = "auto",
    load_format: str = "auto",
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
    stage: Stage = ALONE,
    alike: Alike = Alike.NOWHERE,
) -> Model:
    """Has every rank read its part of a model; arguments as of `load_model`. Returns rank 0's.

    Raises ModelError or ConfigError as `load_model` does, and RankError when another rank fails.
    """
    folder, shard = resolve_model(model), TpShard(0, group.size)
    shard.check(ModelConfig.from_folder(folder))
    group.collect()
    load = Load(
        folder=str(folder),
        dtype=dtype,
        load_format=load_format,
        seed=seed,
        stage=stage,
        alike=alike,
    )
    group.send(Instruction(load))
    try:
        loaded = load_model(
            folder,
            device=group.device,
            dtype=dtype,
            load_format=load_format,
            seed=seed,
            progress=progress,
            shard=shard,
            stage=stage,
        )
    except Exception:
        group.close()
        raise
    group.collect(_LOAD_TIMEOUT_S)
    return loaded


class GroupPasses:
    """`Passes` of the ranks of a group. RankError, from any call, ends the group."""

    def __init__(
        self,
        group: RankGroup,
        model: Model,
        layout: KvLayout,
        attention_backend: str = "auto",
        *,
        stage: Stage = ALONE,
        handle: int | None = None,
    ) -> None:
        """`model`: of `load_ranks`. `layout`: of rank 0's pool, of all layers of the whole model;
        all ranks have its pages. `handle`: of memory on the host for the pools of all ranks
        (`new_memory`), which the caller closes; None: every rank takes memory of its own.

        Raises ModelError as `StagePasses` does, and CapacityError as `KvPool` does.
        """
        self.model = model
        self.stage = stage
        self.processes = Lockstep(group)
        self._group = group
        self._page_table = TableMirror()  # that the other ranks have
        command = Open(
            layouts=rank_layouts(layout, group.size),
            attention_backend=attention_backend,
            is_shared=handle is not None,
        )
        self.processes.send(command)
        whole = None
        if handle is not None:
            group.hand_over(handle)
            whole = mapped(layout, handle)
        memory = None if whole is None else whole[0]
        self.pool = stage_pool(model, layout, memory)
        self.storage = self.pool.storage[None]
        if whole is not None:
            self.storage = whole[:, model.layers.start : model.layers.stop]
            self._new_kv: NewKv = MappedKv(self.storage)
        else:
            self._new_kv = GatheredKv(group.ranks, copies_of(layout, group.size))
        self._own = StagePasses(
            model, self.pool, attention_backend, stage=stage, memory=memory, ranks=group.ranks
        )
        self.states = self._own.states

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
        """`Passes.run`, suspended as in `Lockstep.run`."""
        steps = self._own.run(
            tables,
            is_cut=is_cut,
            kv_only=kv_only,
            fetch=self._for_all(fetch),
            finish=finish,
            remote=remote,
        )

        def begin() -> StagePass:
            return StagePass.of(tables, self._page_table, is_cut=is_cut, kv_only=kv_only)

        return self.processes.run(steps, begin)

    def ring(self, task: RingTask, *, fetch: Fetch | None, finish: Finish) -> Generator[Boundary]:
        """`Passes.ring`, suspended as in `Lockstep.run`.

        No rank begins a step of the ring before the caller asks for the step, for a step waits for
        other instances.
        """
        link = SharedLink(self._group.ranks, task.link, task.link.rank, task.link.size)
        # The caller makes other stages' calls by the task's own link.
        shared = replace(task, link=link)
        steps = self._own.ring(shared, fetch=self._for_all(fetch), finish=finish)
        return self.processes.run(steps, lambda: RingPass.of(task), self._own.is_attn)

    def decode(
        self, token_ids: Tensor, positions: Tensor, page_table: Tensor, kv_lens: Tensor
    ) -> Activations:
        """`Passes.decode`."""
        self.processes.send(
            Decode(
                token_ids=token_ids.numpy(),
                positions=positions.numpy(),
                page_table=self._page_table.delta(page_table.numpy()),
                kv_lens=kv_lens.numpy(),
            )
        )
        with self.processes.watched():
            return self._own.decode(token_ids, positions, page_table, kv_lens)

    def follow(self, page_table: PageTable) -> None:
        """`Passes.follow`."""
        self._own.follow(page_table)

    def capture_prefills(self) -> None:
        """`Passes.capture_prefills`: ranks use no graphs."""

    def shared(self, link: RemoteLink) -> RemoteLink:
        """The link, for a pass of all ranks."""
        return SharedRemote(self._group.ranks, self._new_kv, link)

    def project(self, hidden: Tensor) -> Tensor:
        """`Runner.project`, at the first stage."""
        return self.processes.project(hidden, self._own.project)

    def copy_page(self, source: int, target: int) -> None:
        """`Passes.copy_page`."""
        own = partial(self.pool.copy_unchecked, source, target)
        self.processes.together(CopyPage(source, target), own)

    def _for_all(self, fetch: Fetch | None) -> Fetch | None:
        if fetch is None:
            return None

        def fetch_for_all(memory: Tensor) -> None:
            fetch(memory)
            self._group.ranks.broadcast(memory)

        return fetch_for_all
