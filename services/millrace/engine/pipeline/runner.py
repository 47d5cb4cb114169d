"""A staged model as one `ModelRunner`: the first stage runs here, the others elsewhere.

A pass leaves the first stage with its last operator here, and the next one may begin, while it goes
through the later stages (SPP, Mnemosyne section 4.3). Where logits are wanted, the last stage hands
its rows back, and the first, which has the embedding, makes logits of them.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from millrace.engine.attention.kvp_owner import Remote, RemoteAttention
from millrace.engine.attention.ring import RingLink, RingTask
from millrace.engine.errors import EngineDied
from millrace.engine.forward.local_runner import Boundary, PrefillTask
from millrace.engine.forward.mixed_pass import (
    DecodeRows,
    RaggedTables,
    hand_out_lost,
    mixed_tables,
    prompt_tables,
)
from millrace.engine.forward.prefill_task import check_tasks, hand_out
from millrace.engine.forward.stage_passes import HandOn, Passes
from millrace.engine.kv.pool import KvPool
from millrace.engine.model.config import ModelConfig
from millrace.engine.model.operators import operator_names, required
from millrace.engine.model.stage import Stage
from millrace.engine.parallel.commands import RingPass, Tables
from millrace.engine.pipeline.in_flight import Behind, LaterStages, PassBehind
from millrace.engine.pipeline.messages import (
    LinkCall,
    LinkReply,
    Part,
    Pass,
    Ranks,
    RemoteCall,
    RingStart,
    Step,
    Stepped,
)
from millrace.engine.pipeline.rows import RowsOut
from millrace_kernels import api as kernels
from millrace_kernels.plan import Backend


class PipelineRunner:
    """Has the methods of `ModelRunner`, and their meaning. One thread at a time uses it."""

    def __init__(
        self,
        passes: Passes,
        pool: KvPool,
        storage: Tensor,
        whole: ModelConfig,
        out: RowsOut,
        stages: LaterStages,
        timeout_s: float = 60.0,
    ) -> None:
        """`passes`: of the first stage; ``pool`` keeps the book for all, over the KV of all layers
        of the `whole` model. ``storage`` [pools, layers, pages, ...] is of all ranks, in the
        order of their heads; `pool` has the first.

        `timeout_s`: for a step to go through the stages, when nothing goes before it.
        """
        self.model = passes.model
        self.pool = pool
        self.storage = storage
        self.remote: Remote | None = None
        self._first = passes
        self._out = out
        self._stages = stages
        self._timeout_s = timeout_s
        self.behind = Behind(stages)
        self._names = operator_names(whole)
        self._layers = whole.num_layers
        held = {i: Stage(i, stages.count + 1).layers(self._layers) for i in range(stages.count + 1)}
        self._later_of = {layer: i - 1 for i, layers in held.items() for layer in layers}

    def attention_backend(self) -> Backend:
        """`ModelRunner.attention_backend`."""
        return self._first.attention_backend()

    def prefill(self, task: PrefillTask) -> Generator[Boundary]:
        """`prefill_batch` of one task."""
        return self.prefill_batch([task])

    def prefill_batch(self, tasks: Sequence[PrefillTask]) -> Generator[Boundary]:
        """`ModelRunner.prefill_batch`, but that the KV of later stages' layers is in its pages when
        the tasks' `on_layer` says so. Ends when the next pass may begin; where rows are wanted,
        yields a boundary with `awaited` before, and ends with them."""
        page_tokens = self.pool.layout.page_tokens
        check_tasks(tasks, page_tokens)
        tables = prompt_tables(tasks, page_tokens)  # of spread prompts chunks come in mixed passes
        return self._steps(tasks, tables)

    def prefill_ring(self, task: RingTask) -> Generator[Boundary]:
        """`ModelRunner.prefill_ring`, stage by stage: a later one takes a step when it is asked for
        one, for steps wait for other instances. Its link is used here, on the caller's thread."""
        task.check()
        return self._ring_steps(task)

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
        remote = self._attend_remotely(tables)
        entry = self._begin("", tables, keeps_all=keeps_all, tells=False)
        try:
            entry.is_served = remote is not None
            for _ in self._run_first(entry, tables, remote):
                pass
            self._serve(entry)
            if remote is not None:
                hand_out_lost(remote.end(), decodes, tasks)
            logits = self._finish(entry, tables, tasks, size, keeps_all=keeps_all)
        except BaseException:
            self.behind.give_up(entry)
            raise
        return logits

    def order(self, names: Sequence[str]) -> None:
        """The order of passes in the later stages, by the names of their tasks."""
        self.behind.tell(Ranks(tuple(names)))

    def drop(self, names: Sequence[str]) -> None:
        """Gives up the passes of these names, wherever they are. Returns when none of them writes
        KV any more."""
        self.behind.drop(names)

    @property
    def operator_names(self) -> tuple[str, ...]:
        """`ModelRunner.operator_names`, of all stages: what `prefill_ring` yields."""
        return self._names

    def project(self, hidden: Tensor) -> Tensor:
        """`ModelRunner.project`."""
        return self._first.project(hidden)

    def copy_page(self, source: int, target: int) -> None:
        """`KvPool.copy_page`, of all stages and ranks, whose memory is shared."""
        self.pool.copy_page(source, target)
        others = self.storage[1:]
        others[:, :, target].copy_(others[:, :, source])

    def when_fallen(self, call: Callable[[EngineDied], None]) -> None:
        """Has `call` made once a stage has fallen, on another thread."""
        self.behind.when_fallen(call)

    def check_integrity(self) -> None:
        """Raises IntegrityError when an idle pipeline has a pass somewhere."""
        self.behind.check_integrity()

    def rest(self) -> None:
        """Brings the first stage's ranks to rest; later stages see to theirs."""
        self._first.rest()

    def close(self) -> None:
        """Ends the other stages, and the ranks of this one."""
        self._first.close()
        self._stages.close()

    # -- passes

    def _steps(self, tasks: Sequence[PrefillTask], tables: RaggedTables) -> Generator[Boundary]:
        keeps_all = any(task.want_prompt_logprobs for task in tasks)
        is_wanted = keeps_all or len(tables.rows) > 0
        entry = self._begin(
            tasks[0].name, tables, keeps_all=keeps_all, tells=True, on_layer=_all_of(tasks)
        )
        try:
            yield from self._run_first(entry, tables)
            if not is_wanted:
                self.behind.leave(entry)
                return
            yield Boundary(self._first.model.layers.stop, "handed_on", entry.through)
            self.behind.wait(entry, self._timeout_s)
            self._finish(entry, tables, tasks, 0, keeps_all=keeps_all)
        except BaseException:
            self.behind.give_up(entry)
            raise

    def _attend_remotely(self, tables: RaggedTables) -> RemoteAttention | None:
        """Begins the holders' part of a pass, where there is one."""
        if not tables.remote or self.remote is None:
            return None
        return RemoteAttention(self._first.shared(self.remote.link), tables.remote, tables.slots)

    def _serve(self, entry: PassBehind) -> None:
        """Returns when the pass is through. Until then later stages' calls are made here."""
        while entry.is_served:
            told = self.behind.next_call(self._timeout_s)
            if told is entry:
                entry.is_served = False
            elif isinstance(told, RemoteCall):
                self.behind.tell(LinkReply(self._call_remote(told)), self._later_of[told.layer])
        self.behind.wait(entry, self._timeout_s)

    def _call_remote(self, call: RemoteCall) -> bool | tuple[Part, ...]:
        link = required(self.remote).link
        if call.q is None:
            return tuple(Part.of(part) for part in link.partials(call.layer))
        link.send(call.layer, call.q.tensor(), self.storage[:, call.layer])
        return True

    def _ring_steps(self, task: RingTask) -> Generator[Boundary]:
        entry = self.behind.begin(task.name)
        try:
            self.behind.tell(RingStart(entry.number, task.name, RingPass.of(task)))
            yield from self._first.ring(task, fetch=None, hand_on=self._hand_on(entry))
            for stage in range(self._stages.count):
                while (boundary := self._step(entry, stage, task.link)) is not None:
                    yield boundary
            if task.wants_rows:
                self.behind.wait(entry, self._timeout_s)
                self._finish_ring(entry, task)
                yield Boundary(self._layers, "lm_head")
        except BaseException:
            self.behind.give_up(entry)
            raise
        self.behind.end(entry)

    def _step(self, entry: PassBehind, stage: int, link: RingLink) -> Boundary | None:
        """One operator of a later stage, whose calls of the link are made here."""
        self.behind.tell(Step(entry.number), stage)
        while True:
            told = self.behind.next_call()
            if isinstance(told, LinkCall):
                value = getattr(link, told.method)(told.argument)
                self.behind.tell(LinkReply(bool(value)), stage)
            elif isinstance(told, Stepped) and told.number == entry.number:
                return Boundary(told.layer, told.operator) if told.operator else None

    def _finish_ring(self, entry: PassBehind, task: RingTask) -> None:
        assert entry.rows is not None  # the task wants rows
        hidden = self._normed(entry.rows)
        if task.want_prompt_logprobs:
            task.hidden = hidden
        if task.want_logits:
            task.logits = self.project(hidden[-1:])[0]

    def _normed(self, rows: Tensor) -> Tensor:
        """[r, H] after the final norm, of rows that came back."""
        norm = required(self.model.weights.final_norm)
        return kernels.rms_norm(rows, norm, self.model.config.norm_eps)

    def _begin(
        self,
        name: str,
        tables: RaggedTables,
        *,
        keeps_all: bool,
        tells: bool,
        on_layer: Callable[[int], None] = lambda layer: None,
    ) -> PassBehind:
        later = self._layers - self._first.model.layers.stop
        entry = self.behind.begin(name, on_layer, later if tells else 0)
        kv_only = not (keeps_all or len(tables.rows))
        what = Pass(
            number=entry.number,
            name=name,
            tables=Tables.of(tables),
            is_cut=not keeps_all,
            kv_only=kv_only,
            tells=tells,
        )
        self.behind.tell(what)
        return entry

    def _run_first(
        self, entry: PassBehind, tables: RaggedTables, remote: RemoteAttention | None = None
    ) -> Generator[Boundary]:
        return self._first.run(
            tables,
            is_cut=False,
            kv_only=False,
            fetch=None,
            hand_on=self._hand_on(entry),
            remote=remote,
        )

    def _hand_on(self, entry: PassBehind) -> HandOn:
        def hand_on(x: Tensor, residual: Tensor) -> None:
            self._out.send(entry.number, (x, residual))
            entry.handed_on = True

        return hand_on

    def _finish(
        self,
        entry: PassBehind,
        tables: RaggedTables,
        tasks: Sequence[PrefillTask],
        size: int,
        *,
        keeps_all: bool,
    ) -> Tensor:
        """Gives the tasks their rows; returns float32 [size, vocab] of the decodes before them."""
        hidden: Tensor | None = None
        logits = torch.empty(0, self.model.config.vocab_size, device=self.model.device)
        if entry.rows is not None:
            hidden = self._normed(entry.rows)
            logits = self.project(hidden[tables.rows] if keeps_all else hidden)
        self.behind.end(entry)
        hand_out(tasks, iter(logits[size:]), hidden if keeps_all else None, size)
        return logits[:size]


def _all_of(tasks: Sequence[PrefillTask]) -> Callable[[int], None]:
    def on_layer(layer: int) -> None:
        for task in tasks:
            task.on_layer(layer)

    return on_layer
