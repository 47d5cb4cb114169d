"""A staged model as one `ModelRunner`: the first stage runs here, the others elsewhere.

A pass leaves the first stage with its last operator here, and the next one may begin, while it goes
through the later stages (SPP, Mnemosyne section 4.3). Where logits are wanted, the last stage hands
its rows back, and the first, which has the embedding, makes logits of them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Protocol

import torch
from torch import Tensor

from millrace.engine.awaited import Awaited
from millrace.engine.fallen import EngineFallen
from millrace.engine.kv_pool import KvPool
from millrace.engine.mixed_pass import DecodeRows, RaggedTables, mixed_tables, prompt_tables
from millrace.engine.model_runner import Boundary, PrefillTask
from millrace.engine.operators import required
from millrace.engine.pipeline.messages import (
    Answer,
    Drop,
    Dropped,
    LayerDone,
    Pass,
    Ranks,
    Through,
)
from millrace.engine.pipeline.passes import StagePasses
from millrace.engine.pipeline.rows import Handed, RowsOut
from millrace.engine.prefill_task import check_tasks, hand_out
from millrace.engine.remote_attention import Remote
from millrace_kernels import api as kernels
from millrace_kernels.plan import Backend

_DROP_TIMEOUT_S: Final = 60.0


class StageError(EngineFallen):
    """A stage fell, and the instance with it: names the stage."""


class LaterStages(Protocol):
    """The way to the other stages. What they answer goes to `PipelineRunner.hear`."""

    @property
    def count(self) -> int:
        """Of them."""

    def tell(self, command: Pass | Ranks | Drop, stage: int | None = None) -> None:
        """To one, counted from 0, or to all. Raises StageError when one has fallen."""

    def close(self) -> None:
        """Ends them."""


@dataclass(slots=True, eq=False)
class _Behind:
    """A pass that has begun: what is to be told when it gets on in later stages."""

    name: str
    on_layer: Callable[[int], None]
    through: Awaited = field(default_factory=Awaited)
    handed: Handed | None = None
    handed_on: bool = False
    is_over: bool = False
    is_wanted: bool = True  # somebody waits for its end


class PipelineRunner:
    """Has the methods of `ModelRunner`, and their meaning. One thread at a time uses it."""

    def __init__(
        self,
        passes: StagePasses,
        pool: KvPool,
        out: RowsOut,
        stages: LaterStages,
        timeout_s: float = 60.0,
    ) -> None:
        """`passes`: of the first stage; ``pool`` keeps the book for all, over the KV of all layers.

        `timeout_s`: for a step to go through the stages, when nothing goes before it.
        """
        self.model = passes.model
        self.pool = pool
        self.remote: Remote | None = None
        self._first = passes
        self._out = out
        self._stages = stages
        self._timeout_s = timeout_s
        self._numbers = count()
        self._behind: dict[int, _Behind] = {}
        self._lock = threading.Lock()
        self._dropped: Awaited | None = None
        self._answer: Dropped | None = None
        self._failure: StageError | None = None
        self._lm_head = kernels.prepare_linear(required(passes.model.weights.lm_head))

    def attention_backend(self) -> Backend:
        """`ModelRunner.attention_backend`."""
        return self._first.states.attention_backend()

    def prefill(self, task: PrefillTask) -> Generator[Boundary]:
        """`prefill_batch` of one task."""
        return self.prefill_batch([task])

    def prefill_batch(self, tasks: Sequence[PrefillTask]) -> Generator[Boundary]:
        """`ModelRunner.prefill_batch`, but that the KV of later stages' layers is in its pages when
        the tasks' `on_layer` says so. Ends when the next pass may begin; where rows are wanted,
        yields a boundary with `awaited` before, and ends with them."""
        page_tokens = self.pool.layout.page_tokens
        check_tasks(tasks, page_tokens)
        tables = prompt_tables(tasks, page_tokens, self.remote)
        return self._steps(tasks, tables)

    def decode(
        self, token_ids: Tensor, positions: Tensor, page_table: Tensor, kv_lens: Tensor
    ) -> Tensor:
        """`ModelRunner.decode`."""
        rows = DecodeRows(token_ids=token_ids, positions=positions, kv_lens=kv_lens)
        return self.mixed(rows, page_table, ())

    def mixed(
        self, decodes: DecodeRows, page_table: Tensor, tasks: Sequence[PrefillTask]
    ) -> Tensor:
        """`ModelRunner.mixed`: before any pass that is in a later stage, and to its end."""
        size = len(decodes)
        if tasks or not size:
            check_tasks(tasks, self.pool.layout.page_tokens)
        page_tokens = self.pool.layout.page_tokens
        tables = mixed_tables(decodes, page_table, tasks, page_tokens, self.remote)
        keeps_all = any(task.want_prompt_logprobs for task in tasks)
        number, entry = self._begin("", tables, keeps_all=keeps_all, tells=False)
        try:
            for _ in self._run_first(number, entry, tables):
                pass
            self._await(entry)
            logits = self._finish(entry, tables, tasks, size, keeps_all=keeps_all)
        except BaseException:
            self._give_up(number, entry)
            raise
        return logits

    def order(self, names: Sequence[str]) -> None:
        """The order of passes in the later stages, by the names of their tasks."""
        self._tell(Ranks(tuple(names)))

    def drop(self, names: Sequence[str]) -> None:
        """Gives up the passes of these names, wherever they are. Returns when none of them writes
        KV any more."""
        with self._lock:
            found = [(n, entry) for n, entry in self._behind.items() if entry.name in names]
        for number, entry in found:
            self._give_up(number, entry)

    @property
    def operator_names(self) -> tuple[str, ...]:
        """Of the first stage."""
        return tuple(operator.name for operator in self._first.operators)

    def project(self, hidden: Tensor) -> Tensor:
        """`ModelRunner.project`."""
        return self._lm_head(hidden).float()

    def copy_page(self, source: int, target: int) -> None:
        """`KvPool.copy_page`, of all layers: every stage's pool is in memory that is shared."""
        self.pool.copy_page(source, target)

    def rest(self) -> None:
        """Nothing to bring to rest: stages wait for nobody."""

    def close(self) -> None:
        """Ends the other stages."""
        self._stages.close()

    # -- what comes of the other stages, on other threads

    def hear(self, answer: Answer) -> None:
        """Takes an answer in. Those of earlier stages come first."""
        match answer:
            case LayerDone():
                with self._lock:
                    entry = self._behind.get(answer.number)
                if entry is not None:
                    entry.on_layer(answer.layer)
            case Through():
                self._over(answer.number)
            case Dropped():
                with self._lock:
                    self._answer, waiter = answer, self._dropped
                if waiter is not None:
                    waiter.set()

    def hand(self, handed: Handed) -> None:
        """The last stage has handed back the rows of a pass."""
        with self._lock:
            entry = self._behind.get(handed.number)
            if entry is not None and entry.is_wanted:
                entry.handed = handed
        if entry is None or entry.handed is not handed:
            handed.take()  # nobody wants it any more
        self._over(handed.number)

    def fall(self, error: StageError) -> None:
        """A stage is gone: whoever waits for one gets the error, now and ever after."""
        with self._lock:
            self._failure = self._failure or error
            waiters = [entry.through for entry in self._behind.values()]
            if self._dropped is not None:
                waiters.append(self._dropped)
        for waiter in waiters:
            waiter.set()

    def check_integrity(self) -> int:
        """How many passes are somewhere in the pipeline."""
        with self._lock:
            return len(self._behind)

    def _over(self, number: int) -> None:
        with self._lock:
            entry = self._behind.get(number)
            if entry is None:
                return
            entry.is_over = True
            if not entry.is_wanted:
                del self._behind[number]
        entry.through.set()

    # -- passes

    def _steps(self, tasks: Sequence[PrefillTask], tables: RaggedTables) -> Generator[Boundary]:
        keeps_all = any(task.want_prompt_logprobs for task in tasks)
        is_wanted = keeps_all or len(tables.rows) > 0
        number, entry = self._begin(
            tasks[0].name, tables, keeps_all=keeps_all, tells=True, on_layer=_all_of(tasks)
        )
        try:
            yield from self._run_first(number, entry, tables)
            if not is_wanted:
                self._leave(number, entry)
                return
            yield Boundary(self._first.model.layers.stop, "handed_on", entry.through)
            self._await(entry)
            self._finish(entry, tables, tasks, 0, keeps_all=keeps_all)
        except BaseException:
            self._give_up(number, entry)
            raise

    def _begin(
        self,
        name: str,
        tables: RaggedTables,
        *,
        keeps_all: bool,
        tells: bool,
        on_layer: Callable[[int], None] = lambda layer: None,
    ) -> tuple[int, _Behind]:
        number, entry = next(self._numbers), _Behind(name, on_layer)
        kv_only = not (keeps_all or len(tables.rows))
        with self._lock:
            self._behind[number] = entry
        self._tell(
            Pass.of(number, name, tables, is_cut=not keeps_all, kv_only=kv_only, tells=tells)
        )
        return number, entry

    def _run_first(self, number: int, entry: _Behind, tables: RaggedTables) -> Generator[Boundary]:
        def hand_on(x: Tensor, residual: Tensor) -> None:
            self._out.send(number, (x, residual))
            entry.handed_on = True

        return self._first.run(tables, is_cut=False, kv_only=False, fetch=None, hand_on=hand_on)

    def _await(self, entry: _Behind) -> None:
        if not entry.through.wait(self._timeout_s):
            raise StageError(f"no later stage has ended a pass for {self._timeout_s:g} s")
        if self._failure is not None:
            raise self._failure

    def _leave(self, number: int, entry: _Behind) -> None:
        """Nobody waits for the pass, which goes on through the later stages."""
        with self._lock:
            entry.is_wanted = False
            if entry.is_over:
                self._behind.pop(number, None)

    def _finish(
        self,
        entry: _Behind,
        tables: RaggedTables,
        tasks: Sequence[PrefillTask],
        size: int,
        *,
        keeps_all: bool,
    ) -> Tensor:
        """Gives the tasks their rows; returns float32 [size, vocab] of the decodes before them."""
        handed, vocab = entry.handed, self.model.config.vocab_size
        hidden: Tensor | None = None
        logits = torch.empty(0, vocab, device=self.model.device)
        if handed is not None:
            norm = required(self.model.weights.final_norm)
            hidden = kernels.rms_norm(handed.x, norm, self.model.config.norm_eps)
            handed.take()
            logits = self.project(hidden[tables.rows] if keeps_all else hidden)
        with self._lock:
            self._behind = {n: e for n, e in self._behind.items() if e is not entry}
        hand_out(tasks, iter(logits[size:]), hidden if keeps_all else None, size)
        return logits[:size]

    def _give_up(self, number: int, entry: _Behind) -> None:
        """Drops the pass where it is. Returns when no stage writes its KV any more."""
        with self._lock:
            if self._behind.pop(number, None) is None or self._failure is not None:
                return
        if entry.handed is not None:
            entry.handed.take()
            return
        comes = entry.handed_on
        for stage in range(self._stages.count):
            if self._drop(number, stage, comes=comes):
                comes = False  # those behind it will never see it
        # One that had left the last stage comes back, and is taken by `hand`.

    def _drop(self, number: int, stage: int, *, comes: bool) -> bool:
        """Whether the stage had the pass and dropped it."""
        with self._lock:
            waiter = self._dropped = Awaited()
        self._tell(Drop(number, comes), stage)
        if not waiter.wait(_DROP_TIMEOUT_S):
            raise StageError(f"stage {stage + 1} does not let go of a pass")
        if self._failure is not None:
            raise self._failure
        return self._answer is not None and not self._answer.handed_on

    def _tell(self, command: Pass | Ranks | Drop, stage: int | None = None) -> None:
        if self._failure is not None:
            raise self._failure
        self._stages.tell(command, stage)


def _all_of(tasks: Sequence[PrefillTask]) -> Callable[[int], None]:
    def on_layer(layer: int) -> None:
        for task in tasks:
            task.on_layer(layer)

    return on_layer
