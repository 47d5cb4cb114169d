"""The commands of rank 0 to the other ranks, in one order to all, and each rank's answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from millrace.core.config import EngineConfig
from millrace.core.kv.kvp_pass import RemoteRows
from millrace.core.kv.layout import KvLayout
from millrace.engine.attention.ring import KvBlock, RingLink, RingTask
from millrace.engine.forward.mixed_pass import RaggedTables
from millrace.engine.kv.page_table import TableDelta, TableMirror
from millrace.engine.model.stage import ALONE, Stage
from millrace.engine.sizing import member_pages
from millrace_kernels.determinism import Alike

_NO_TABLE: Final = torch.empty(0, 0, dtype=torch.int32)
_TENSORS: Final = tuple(f.name for f in fields(RaggedTables) if f.name != "remote")


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Read your part of a model; arguments as of `load_model`. Drops the model before."""

    folder: str
    dtype: str
    load_format: str
    seed: int
    stage: Stage = ALONE
    alike: Alike = Alike.NOWHERE


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Say for how many pages of `layers` layers your device has memory. `one_page`: of the whole
    instance. Other arguments as of `member_pages`."""

    config: EngineConfig
    least_bytes: int
    one_page: KvLayout
    layers: int
    sharers: int

    def pages_on(self, device: torch.device) -> int:
        return member_pages(
            self.config,
            device,
            self.least_bytes,
            page_bytes=self.layers * self.one_page.page_bytes,
            whole_page_bytes=self.one_page.page_of_all_bytes,
            sharers=self.sharers,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Make a pool of your layers, and their `StagePasses`. With `is_shared` the memory of all
    ranks' pools follows, as a file descriptor; else the pool has memory of its own."""

    layouts: tuple[KvLayout, ...]  # of every rank, of all layers
    attention_backend: str
    is_shared: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPass:
    """A `RingTask` as a message, without its link: rank and size are its place in the ring."""

    rank: int
    size: int
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    blocks: tuple[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]], ...]  # pages, positions
    last_layer: bool
    want_logits: bool
    want_hidden: bool

    @classmethod
    def of(cls, task: RingTask) -> RingPass:
        return cls(
            rank=task.link.rank,
            size=task.link.size,
            token_ids=task.token_ids.cpu().numpy(),
            positions=task.positions.numpy(),
            slots=task.slots.numpy(),
            blocks=tuple((b.pages.numpy(), b.positions.numpy()) for b in task.blocks),
            last_layer=task.last_layer,
            want_logits=task.want_logits,
            want_hidden=task.want_hidden,
        )

    def unpacked(self, link: RingLink) -> RingTask:
        return RingTask(
            token_ids=torch.from_numpy(self.token_ids),
            positions=torch.from_numpy(self.positions),
            slots=torch.from_numpy(self.slots),
            blocks=[KvBlock(*map(torch.from_numpy, block)) for block in self.blocks],
            link=link,
            last_layer=self.last_layer,
            want_logits=self.want_logits,
            want_hidden=self.want_hidden,
        )


@dataclass(frozen=True, slots=True)
class Tables:
    """`RaggedTables` as a message: arrays in the place of its tensors, by field."""

    arrays: Mapping[str, npt.NDArray[Any]]
    remote: tuple[RemoteRows, ...]

    @classmethod
    def of(cls, tables: RaggedTables) -> Tables:
        arrays = {name: getattr(tables, name).numpy() for name in _TENSORS}
        return cls(arrays, tuple(tables.remote))

    def unpacked(self) -> RaggedTables:
        tensors = {name: torch.from_numpy(array) for name, array in self.arrays.items()}
        return RaggedTables(**tensors, remote=self.remote)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePass:
    """A pass over a stage's layers; arguments as of `Passes.run`. If the stage before handed rows
    on, rank 0 broadcasts them when the pass begins."""

    tables: Tables  # with no page table
    page_table: TableDelta
    is_cut: bool
    kv_only: bool

    @classmethod
    def of(
        cls, tables: RaggedTables, mirror: TableMirror, *, is_cut: bool, kv_only: bool
    ) -> StagePass:
        return cls(
            tables=Tables.of(replace(tables, page_table=_NO_TABLE)),
            page_table=mirror.delta(tables.page_table.numpy()),
            is_cut=is_cut,
            kv_only=kv_only,
        )

    def unpacked(self, mirror: TableMirror) -> RaggedTables:
        # Other passes change the mirror while this one is suspended.
        page_table = mirror.apply(self.page_table).clone()
        return replace(self.tables.unpacked(), page_table=page_table)


Begin = RingPass | StagePass
"""A pass to begin."""


@dataclass(frozen=True, slots=True)
class Run:
    """Run a pass to its end, or up to a stop that ranks agree on. `begin`: of a new pass."""

    number: int
    begin: Begin | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """A decode step: arguments as of `Runner.decode`, the page table as its changes."""

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    page_table: TableDelta
    kv_lens: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Project:
    """Logits of `rows` rows of hidden, which rank 0 broadcasts."""

    rows: int


@dataclass(frozen=True, slots=True)
class CopyPage:
    """`KvPool.copy_unchecked`."""

    source: int
    target: int


Command = Load | Room | Open | Run | Decode | Project | CopyPage


@dataclass(frozen=True, slots=True)
class Instruction:
    """A command, and the numbers of suspended passes to give up first."""

    command: Command
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """A rank's answer to a command: how many operators of its pass have run, or the pages of
    `Room`; 0 for other commands."""

    count: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank's last message. With `by_peer` the rank failed because another rank did."""

    error: str
    by_peer: bool
