"""A tensor-parallel model as one `ModelRunner`: all ranks run their parts in `Lockstep`."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import numpy as np
from torch import Tensor

from millrace.core.kv.layout import KvLayout
from millrace.engine.attention.kvp_owner import Remote
from millrace.engine.attention.ring import RingTask
from millrace.engine.errors import EngineDied
from millrace.engine.forward.local_runner import Boundary, ModelRunner, PrefillTask
from millrace.engine.forward.mixed_pass import DecodeRows
from millrace.engine.forward.prefill_task import check_tasks
from millrace.engine.kv.page_table import TableMirror
from millrace.engine.kv.pool import KvPool
from millrace.engine.model.config import ModelConfig
from millrace.engine.model.loader import Model, load_model, resolve_model
from millrace.engine.model.stage import ALONE, Stage
from millrace.engine.model.tp_shard import Shard
from millrace.engine.parallel.commands import CopyPage, Decode, Load, Open, Order, RingPass, Task
from millrace.engine.parallel.kv_memory import mapped, new_memory, rank_layouts
from millrace.engine.parallel.kvp_links import SharedRemote
from millrace.engine.parallel.lockstep import Lockstep
from millrace.engine.parallel.rank_group import RankGroup
from millrace.engine.parallel.ring_links import SharedLink
from millrace_kernels.plan import Backend

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
) -> Model:
    """Has every rank read its part of a model; arguments as of `load_model`. Returns rank 0's.

    Raises ModelError or ConfigError as `load_model` does, and RankError when another rank fails.
    """
    folder, shard = resolve_model(model), Shard(0, group.size)
    shard.check(ModelConfig.from_folder(folder))
    group.collect()
    load = Load(folder=str(folder), dtype=dtype, load_format=load_format, seed=seed, stage=stage)
    group.tell(Order(load))
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


class GroupRunner:
    """Has the methods of `ModelRunner`, and their meaning. One thread at a time uses it.

    RankError, from whichever call meets it, ends the group.
    """

    def __init__(
        self, group: RankGroup, model: Model, layout: KvLayout, attention_backend: str = "auto"
    ) -> None:
        """`model`: of `load_ranks`; `layout`: of rank 0's pool, whose pages all ranks have.

        ``pool`` is rank 0's, and keeps the book for all. ``storage`` is every pool that this
        process can read, [pools, ...] in the order of their heads, contiguous: on the host those
        of all ranks, on CUDA rank 0's. Raises ModelError and CapacityError as `ModelRunner` and
        `KvPool` do.
        """
        self.model = model
        self._group = group
        self._lockstep = Lockstep(group)
        self._page_table = TableMirror()  # that the others have
        self.pool, self.storage = self._open(layout, attention_backend)
        self._runner = ModelRunner(model, self.pool, attention_backend, group.ranks)
        self.remote: Remote | None = None

    def attention_backend(self) -> Backend:
        """`ModelRunner.attention_backend`."""
        return self._runner.attention_backend()

    def prefill(self, task: PrefillTask) -> Generator[Boundary]:
        """`prefill_batch` of one task."""
        return self.prefill_batch([task])

    def prefill_batch(self, tasks: Sequence[PrefillTask]) -> Generator[Boundary]:
        """`ModelRunner.prefill_batch`, suspended as in `Lockstep.run`."""
        steps = self._runner.prefill_batch(tasks)  # refuses what makes no sense
        return self._lockstep.run(steps, lambda: [Task.of(task) for task in tasks])

    def prefill_ring(self, task: RingTask) -> Generator[Boundary]:
        """`ModelRunner.prefill_ring`, suspended as in `prefill_batch`; takes the task's link over.

        No rank begins a step of the ring before the caller asks for it, for a step waits for other
        instances. Raises ValueError on CUDA, where a transport reaches rank 0's K/V alone.
        """
        if self._group.device.type != "cpu":
            raise ValueError(
                f"a ring of groups of {self._group.size} ranks needs them on the host, "
                f"not on {self._group.device}"
            )
        task.link = SharedLink(self._group.ranks, task.link, task.link.rank, task.link.size)
        steps = self._runner.prefill_ring(task)
        return self._lockstep.run(steps, lambda: RingPass.of(task), self._runner.is_attn)

    def decode(
        self, token_ids: Tensor, positions: Tensor, page_table: Tensor, kv_lens: Tensor
    ) -> Tensor:
        """`ModelRunner.decode`."""
        rows = DecodeRows(token_ids=token_ids, positions=positions, kv_lens=kv_lens)
        self._tell_rows(rows, page_table, ())
        with self._lockstep.watched():
            return self._runner.decode(token_ids, positions, page_table, kv_lens)

    def mixed(
        self, decodes: DecodeRows, page_table: Tensor, tasks: Sequence[PrefillTask]
    ) -> Tensor:
        """`ModelRunner.mixed`."""
        if tasks or not len(decodes):
            check_tasks(tasks, self.pool.layout.page_tokens)  # before the others hear of it
        self._tell_rows(decodes, page_table, tasks)
        with self._lockstep.watched():
            return self._runner.mixed(decodes, page_table, tasks)

    def _tell_rows(
        self, decodes: DecodeRows, page_table: Tensor, tasks: Sequence[PrefillTask]
    ) -> None:
        no_pages = np.empty(0, dtype=np.int32)  # the table has them
        remote = self.remote
        is_spread = bool(decodes.shards) or any(task.is_spread for task in tasks)
        if is_spread and remote is not None:
            link = SharedRemote(self._group.ranks, remote.link, self.storage)
            self._runner.remote = replace(remote, link=link)
        self._lockstep.tell(
            Decode(
                token_ids=decodes.token_ids.numpy(),
                positions=decodes.positions.numpy(),
                page_table=self._page_table.delta(page_table.numpy()),
                kv_lens=decodes.kv_lens.numpy(),
                tasks=[replace(Task.of(task), pages=no_pages) for task in tasks],
                shards=dict(decodes.shards),
                spill_pages=list(remote.spill_pages) if is_spread and remote else None,
                reach=remote.reach if is_spread and remote else None,
            )
        )

    @property
    def operator_names(self) -> tuple[str, ...]:
        """`ModelRunner.operator_names`."""
        return self._runner.operator_names

    def project(self, hidden: Tensor) -> Tensor:
        """`ModelRunner.project`."""
        return self._lockstep.project(hidden, self._runner.project)

    def copy_page(self, source: int, target: int) -> None:
        """`KvPool.copy_page`, on every rank."""
        self._lockstep.tell(CopyPage(source, target))
        self.pool.copy_page(source, target)

    def order(self, names: Sequence[str]) -> None:
        """Nothing to put in order: what is behind its caller, in later stages, is a pipeline's."""

    def drop(self, names: Sequence[str]) -> None:
        """Nothing to give up: likewise."""

    def check_integrity(self) -> None:
        """Nothing stays behind: likewise."""

    def when_fallen(self, call: Callable[[EngineDied], None]) -> None:
        """Never calls: a rank that fell is found out by the next pass."""

    def rest(self) -> None:
        """`Lockstep.rest`."""
        self._lockstep.rest()

    def close(self) -> None:
        """Ends the other ranks. Passes that were left are lost."""
        self._lockstep.close()

    def _open(self, layout: KvLayout, attention_backend: str) -> tuple[KvPool, Tensor]:
        layouts = rank_layouts(layout, self._group.size)
        command = Open(layouts=layouts, attention_backend=attention_backend)
        if self._group.device.type != "cpu":
            pool = KvPool(layout, self._group.device)
            self._lockstep.tell(command)
            return pool, pool.storage[None]
        handle = new_memory(layout)
        try:
            storage = mapped(layout, handle)
            self._lockstep.tell(command)
            self._group.hand_over(handle)
        finally:
            os.close(handle)
        return KvPool(layout, self._group.device, storage[0]), storage
