"""What rank 0 tells the others, in one order to all, and what each answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from millrace.core.kv.kvp_pass import RemoteRows, RemoteShard
from millrace.core.kv.layout import KvLayout
from millrace.engine.attention.ring import KvBlock, RingLink, RingTask
from millrace.engine.forward.local_runner import PrefillTask
from millrace.engine.forward.mixed_pass import DecodeRows, RaggedTables
from millrace.engine.kv.page_table import TableDelta
from millrace.engine.model.stage import ALONE, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """Read your part of a model; arguments as of `load_model`. Drops what was there before."""

    folder: str
    dtype: str
    load_format: str
    seed: int
    stage: Stage = ALONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Open:
    """Make a pool, over your layers, and what runs them. On the host the pools' memory follows, as
    a file descriptor."""

    layouts: tuple[KvLayout, ...]  # of every rank, of all layers
    attention_backend: str


@dataclass(frozen=True, slots=True)
class Task:
    """A `PrefillTask` on its way. token_ids: int64 [L]; pages: int32."""

    token_ids: npt.NDArray[np.int64]
    history_tokens: int
    pages: npt.NDArray[np.int32]
    want_logits: bool
    want_prompt_logprobs: bool
    shards: tuple[RemoteShard, ...] = ()

    @classmethod
    def of(cls, task: PrefillTask) -> Task:
        return cls(
            task.token_ids.cpu().numpy(),
            task.history_tokens,
            np.asarray(task.pages, dtype=np.int32),
            task.want_logits,
            task.want_prompt_logprobs,
            tuple(task.shards),
        )

    def unpacked(self) -> PrefillTask:
        return PrefillTask(
            token_ids=torch.from_numpy(self.token_ids),
            history_tokens=self.history_tokens,
            pages=self.pages,
            want_logits=self.want_logits,
            want_prompt_logprobs=self.want_prompt_logprobs,
            shards=self.shards,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RingPass:
    """A `RingTask` on its way, without its link: rank and size are its place in the ring."""

    rank: int
    size: int
    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    blocks: tuple[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]], ...]  # pages, positions
    last_layer: bool
    want_logits: bool
    want_prompt_logprobs: bool

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
            want_prompt_logprobs=task.want_prompt_logprobs,
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
            want_prompt_logprobs=self.want_prompt_logprobs,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Tables:
    """`RaggedTables` on their way."""

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    indptr: npt.NDArray[np.int32]
    kv_lens: npt.NDArray[np.int32]
    page_table: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int64]
    wanted_indptr: npt.NDArray[np.int32]
    remote: tuple[RemoteRows, ...]

    @classmethod
    def of(cls, tables: RaggedTables) -> Tables:
        return cls(
            token_ids=tables.token_ids.numpy(),
            positions=tables.positions.numpy(),
            slots=tables.slots.numpy(),
            indptr=tables.indptr.numpy(),
            kv_lens=tables.kv_lens.numpy(),
            page_table=tables.page_table.numpy(),
            rows=tables.rows.numpy(),
            wanted_indptr=tables.wanted_indptr.numpy(),
            remote=tuple(tables.remote),
        )

    def unpacked(self) -> RaggedTables:
        return RaggedTables(
            token_ids=torch.from_numpy(self.token_ids),
            positions=torch.from_numpy(self.positions),
            slots=torch.from_numpy(self.slots),
            indptr=torch.from_numpy(self.indptr),
            kv_lens=torch.from_numpy(self.kv_lens),
            page_table=torch.from_numpy(self.page_table),
            rows=torch.from_numpy(self.rows),
            wanted_indptr=torch.from_numpy(self.wanted_indptr),
            remote=self.remote,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePass:
    """A pass of a stage's layers, arguments as of `StagePasses.run`. Rows that the stage before
    handed on are broadcast by rank 0 when it begins."""

    tables: Tables
    is_cut: bool
    kv_only: bool


Begin = Sequence[Task] | RingPass | StagePass
"""What a rank needs to begin a pass."""


@dataclass(frozen=True, slots=True)
class Run:
    """Run a pass up to the stop that will be agreed, or to its end. `begin`: a new one."""

    number: int
    begin: Begin | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Decode:
    """A decode step, and chunks in the same pass where there are `tasks`: arguments as of
    `ModelRunner.decode` and `mixed`. Of the page table goes what it did not hold before; it has the
    tasks' pages, behind the decodes'.
    """

    token_ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    page_table: TableDelta
    kv_lens: npt.NDArray[np.int32]
    tasks: Sequence[Task] = ()
    shards: Mapping[int, Sequence[RemoteShard]] = field(default_factory=dict)
    spill_pages: Sequence[int] | None = None  # as of `Remote`, where there are spread requests
    reach: int | None = None

    @property
    def rows(self) -> DecodeRows:
        return DecodeRows(
            token_ids=torch.from_numpy(self.token_ids),
            positions=torch.from_numpy(self.positions),
            kv_lens=torch.from_numpy(self.kv_lens),
            shards=self.shards,
        )


@dataclass(frozen=True, slots=True)
class Project:
    """Logits of `rows` rows of hidden, which rank 0 broadcasts."""

    rows: int


@dataclass(frozen=True, slots=True)
class CopyPage:
    """`KvPool.copy_page`."""

    source: int
    target: int


Command = Load | Open | Run | Decode | Project | CopyPage


@dataclass(frozen=True, slots=True)
class Order:
    """A command, and the numbers of suspended passes that are given up before it."""

    command: Command
    dropped: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Done:
    """A rank's answer to a command: the operators that the pass it ran has behind it, else 0."""

    operators: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A rank's last word. With `by_peer` it fell because another did."""

    error: str
    by_peer: bool
