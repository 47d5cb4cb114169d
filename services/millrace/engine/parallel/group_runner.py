"""A tensor-parallel model as one `ModelRunner`: rank 0 runs its part, the others mirror it.

Rank 0 leads by what its caller does: where it goes on with a pass, the others were told to run it,
and run ahead of it as far as their collectives let them. Where the caller turns to something else,
all stop at an operator that none has begun (`StopCounter`) and rank 0 runs up to it too; what it
ran so without being asked is yielded when the caller comes back.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Final

import numpy as np
from torch import Tensor

from millrace.core.errors import IntegrityError
from millrace.core.kv_layout import KvLayout
from millrace.engine.fallen import EngineFallen
from millrace.engine.kv_pool import KvPool
from millrace.engine.loader import Model, load_model, resolve_model
from millrace.engine.mixed_pass import DecodeRows
from millrace.engine.model_config import ModelConfig
from millrace.engine.model_runner import Boundary, ModelRunner, PrefillTask
from millrace.engine.page_table import TableMirror
from millrace.engine.parallel.commands import (
    Command,
    CopyPage,
    Decode,
    Load,
    Open,
    Order,
    Project,
    RingPass,
    Run,
    Task,
)
from millrace.engine.parallel.rank_group import RankError, RankGroup
from millrace.engine.parallel.sharding import Shard
from millrace.engine.parallel.shared_link import SharedLink
from millrace.engine.parallel.shared_pool import mapped, new_memory
from millrace.engine.parallel.shared_remote import SharedRemote
from millrace.engine.prefill_task import check_tasks
from millrace.engine.remote_attention import Remote
from millrace.engine.ring_attention import RingTask
from millrace_kernels.plan import Backend

_LOAD_TIMEOUT_S: Final = 3600.0


@dataclass(slots=True, eq=False)
class _Pass:
    number: int
    steps: Iterator[Boundary]
    tasks: Sequence[PrefillTask] | RingTask
    operators: int = 0  # that rank 0 has run
    ahead: deque[Boundary] = field(default_factory=deque)  # to be yielded
    attn: Boundary | None = None  # behind rank 0, and perhaps not yet behind the others
    told: bool = False  # the others have begun it
    over: bool = False

    def to_tell(self) -> Sequence[Task] | RingPass | None:
        """What the others need to begin it."""
        if self.told:
            return None
        if isinstance(self.tasks, RingTask):
            return RingPass.of(self.tasks)
        return [Task.of(task) for task in self.tasks]

    def reach(self, boundary: Boundary) -> None:
        """Rank 0 has come to a boundary. The all-reduce of o_proj shows that attn is behind all."""
        if boundary.operator == "attn":
            self.attn = boundary
            return
        if self.attn is not None:
            self.ahead.append(self.attn)
            self.attn = None
        self.ahead.append(boundary)


def load_ranks(
    group: RankGroup,
    model: str | Path,
    *,
    dtype: str = "auto",
    load_format: str = "auto",
    seed: int = 0,
    progress: Callable[[float], None] | None = None,
) -> Model:
    """Has every rank read its part of a model; arguments as of `load_model`. Returns rank 0's.

    Raises ModelError or ConfigError as `load_model` does, and RankError when another rank fails.
    """
    folder, shard = resolve_model(model), Shard(0, group.size)
    shard.check(ModelConfig.from_folder(folder))
    group.collect()
    load = Load(folder=str(folder), dtype=dtype, load_format=load_format, seed=seed)
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
        self._operators = 0  # of the last command, behind rank 0
        self._running: _Pass | None = None  # that all ranks are in the middle of
        self._dropped: list[int] = []
        self._page_table = TableMirror()  # that the others have
        self.pool, self.storage = self._open(layout, attention_backend)
        self._runner = ModelRunner(model, self.pool, attention_backend, group.ranks)
        self._numbers = count()
        self.remote: Remote | None = None

    def attention_backend(self) -> Backend:
        """`ModelRunner.attention_backend`."""
        return self._runner.attention_backend()

    def prefill(self, task: PrefillTask) -> Generator[Boundary]:
        """`prefill_batch` of one task."""
        return self.prefill_batch([task])

    def prefill_batch(self, tasks: Sequence[PrefillTask]) -> Generator[Boundary]:
        """`ModelRunner.prefill_batch`: suspended where it is left, by whatever is called next.

        The KV of a layer is in the pages of all ranks once its ``attn`` is yielded; operators may
        have run that are not yet yielded. A caller that turns to nothing else for longer than a
        collective may wait calls `rest`.
        """
        steps = self._runner.prefill_batch(tasks)  # refuses what makes no sense
        return self._steps(_Pass(next(self._numbers), steps, tuple(tasks)))

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
        return self._steps(_Pass(next(self._numbers), self._runner.prefill_ring(task), task))

    def decode(
        self, token_ids: Tensor, positions: Tensor, page_table: Tensor, kv_lens: Tensor
    ) -> Tensor:
        """`ModelRunner.decode`."""
        rows = DecodeRows(token_ids=token_ids, positions=positions, kv_lens=kv_lens)
        self._tell_rows(rows, page_table, ())
        with self._watched():
            return self._runner.decode(token_ids, positions, page_table, kv_lens)

    def mixed(
        self, decodes: DecodeRows, page_table: Tensor, tasks: Sequence[PrefillTask]
    ) -> Tensor:
        """`ModelRunner.mixed`."""
        if tasks or not len(decodes):
            check_tasks(tasks, self.pool.layout.page_tokens)  # before the others hear of it
        self._tell_rows(decodes, page_table, tasks)
        with self._watched():
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
        self._tell(
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
        self._tell(Project(len(hidden)))
        with self._watched():
            self._group.ranks.broadcast(hidden.contiguous())
            return self._runner.project(hidden)

    def copy_page(self, source: int, target: int) -> None:
        """`KvPool.copy_page`, on every rank."""
        self._tell(CopyPage(source, target))
        self.pool.copy_page(source, target)

    def order(self, names: Sequence[str]) -> None:
        """Nothing to put in order: what is behind its caller, in later stages, is a pipeline's."""

    def drop(self, names: Sequence[str]) -> None:
        """Nothing to give up: likewise."""

    def check_integrity(self) -> None:
        """Nothing stays behind: likewise."""

    def when_fallen(self, call: Callable[[EngineFallen], None]) -> None:
        """Never calls: a rank that fell is found out by the next pass."""

    def rest(self) -> None:
        """Brings all ranks to a boundary that they agree on; the pass goes on when next asked."""
        current = self._running
        if current is None:
            return
        self._group.counter.request_stop()
        while self._run_operator(current):
            pass

    def close(self) -> None:
        """Ends the other ranks. Passes that were left are lost."""
        if self._group.failure is None:
            self.rest()
        self._group.close()

    def _open(self, layout: KvLayout, attention_backend: str) -> tuple[KvPool, Tensor]:
        heads = [
            Shard(r, self._group.size).kv_heads(layout.num_kv_heads)
            for r in range(self._group.size)
        ]
        layouts = tuple(replace(layout, head_start=h.start, head_count=h.count) for h in heads)
        command = Open(layouts=layouts, attention_backend=attention_backend)
        if self._group.device.type != "cpu":
            pool = KvPool(layout, self._group.device)
            self._tell(command)
            return pool, pool.storage[None]
        handle = new_memory(layout)
        try:
            storage = mapped(layout, handle)
            self._tell(command)
            self._group.hand_over(handle)
        finally:
            os.close(handle)
        return KvPool(layout, self._group.device, storage[0]), storage

    def _steps(self, current: _Pass) -> Generator[Boundary]:
        try:
            while current.ahead or self._advance(current):
                yield current.ahead.popleft()
        finally:
            if self._running is current and self._group.failure is None:
                self.rest()
            if current.told and not current.over:
                self._dropped.append(current.number)  # told with what is told next

    def _advance(self, current: _Pass) -> bool:
        """Runs an operator of the pass on all ranks; False when it was over."""
        while not current.ahead and not current.over:
            if self._running is not current:
                self._resume(current)
            self._run_operator(current)
        return bool(current.ahead)

    def _resume(self, current: _Pass) -> None:
        self._tell(Run(current.number, current.to_tell()), current.operators)
        current.told = True
        self._running = current

    def _run_operator(self, current: _Pass) -> bool:
        """Runs one at rank 0. False, with nobody running, where a stop was agreed or at the end."""
        with self._watched():
            if self._enters(current):
                if (boundary := next(current.steps, None)) is not None:
                    current.operators += 1
                    current.reach(boundary)
                    return True
                current.over = True
        self._running = None
        self._operators = current.operators
        if current.over and current.attn is not None:
            self._meet()
            current.ahead.append(current.attn)
        return False

    def _enters(self, current: _Pass) -> bool:
        """Whether the pass's next operator may begin; at a step of the ring the others wait for
        the answer."""
        enters = self._group.counter.enter(0, current.operators)
        if isinstance(current.tasks, RingTask) and self._runner.is_attn(current.operators):
            self._group.ranks.tell(enters)
        return enters

    def _meet(self) -> None:
        """Waits until all ranks have done what they were told, and sees that they came as far."""
        with self._watched():
            for rank, behind in enumerate(self._group.collect(), start=1):
                if behind != self._operators:
                    raise IntegrityError(
                        f"rank {rank} stopped at operator {behind}, rank 0 at {self._operators}"
                    )

    def _tell(self, command: Command, operators: int = 0) -> None:
        """`operators`: of the pass that all ranks go on with."""
        self.rest()
        self._meet()
        with self._watched():
            self._operators = 0
            self._group.counter.begin(operators)
            dropped, self._dropped = tuple(self._dropped), []
            self._group.tell(Order(command, dropped))

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """What goes wrong at rank 0 ends all ranks: they are not where it is any more."""
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            raise self._group.fell(error) from error
