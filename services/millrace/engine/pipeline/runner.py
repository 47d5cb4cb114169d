"""A model in several stages as one `Runner`: only the first stage runs in this process.

After the last operator of the first stage, the next pass may begin here while later stages compute
this one (SPP, Mnemosyne section 4.3). Where logits are wanted, the last stage hands its rows back,
and the first stage, which has the embedding, makes logits of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence

import torch
from torch import Tensor

from millrace.core.errors import TransferError
from millrace.engine.attention.kvp_owner import Remote, RemoteAttention, RemoteLink
from millrace.engine.attention.ring import RingLink, RingTask
from millrace.engine.errors import EngineDied
from millrace.engine.forward.mixed_pass import (
    DecodeRows,
    RaggedTables,
    hand_out_lost,
    mixed_tables,
    prompt_tables,
    remote_attention,
)
from millrace.engine.forward.passes import Boundary, Finish, Passes, Processes
from millrace.engine.forward.prefill_task import PrefillTask, check_tasks, hand_out
from millrace.engine.kv.page_table import PageTable
from millrace.engine.kv.pool import KvPool
from millrace.engine.model.config import ModelConfig
from millrace.engine.model.operators import Activations, required
from millrace.engine.model.stage import Stage
from millrace.engine.parallel.commands import RingPass, Tables
from millrace.engine.pipeline.in_flight import InFlight, LaterStages, PassInFlight
from millrace.engine.pipeline.messages import (
    LinkCall,
    LinkReply,
    PartialMessage,
    PassStart,
    RemoteCall,
    RingStart,
    Step,
    Stepped,
)
from millrace.engine.pipeline.piped_link import shared_link
from millrace.engine.pipeline.rows import RowsOut
from millrace_kernels import api as kernels


class PipelineRunner:
    """A `Runner` of a model in several stages, whose first stage this process leads."""

    def __init__(
        self,
        passes: Passes,
        pool: KvPool,
        storage: Tensor,
        whole: ModelConfig,
        out: RowsOut,
        stages: LaterStages,
        timeout_s: float = 60.0,
        *,
        own_pools: bool = False,
    ) -> None:
        """`passes`: of the first stage. `pool`: over the KV of all layers of the `whole` model, or,
        with `own_pools`, of the first stage's layers: then every stage has memory of its own.
        `storage`: as of `Runner`. `timeout_s`: for a step to go through the stages, when nothing
        goes before it.
        """
        self.model = passes.model
        self.states = passes.states
        self.pool = pool
        self.storage = storage
        self.remote: Remote | None = None
        self._first = passes
        self._out = out
        self._stages = stages
        self._timeout_s = timeout_s
        self._own_pools = own_pools
        self.in_flight = InFlight(stages)
        self._layers = whole.num_layers
        held = {i: Stage(i, stages.count + 1).layers(self._layers) for i in range(stages.count + 1)}
        self._later_of = {layer: i - 1 for i, layers in held.items() for layer in layers}

    @property
    def processes(self) -> Processes:
        """`Runner.processes`: this runner's `rest` and `close`."""
        return self

    def prefill_batch(self, tasks: Sequence[PrefillTask]) -> Generator[Boundary]:
        """`Runner.prefill_batch`."""
        page_tokens = self.pool.layout.page_tokens
        check_tasks(tasks, page_tokens)
        tables = prompt_tables(tasks, page_tokens)  # chunks of spread prompts come to `mixed`
        return self._steps(tasks, tables)

    def prefill_ring(self, task: RingTask) -> Generator[Boundary]:
        """`Runner.prefill_ring`, stage by stage. A later stage takes a step only when asked for
        the step, for steps wait for other instances."""
        task.check()
        return self._ring_steps(task)

    def decode(
        self, token_ids: Tensor, positions: Tensor, page_table: Tensor, kv_lens: Tensor
    ) -> Tensor:
        """`Runner.decode`."""
        rows = DecodeRows(token_ids=token_ids, positions=positions, kv_lens=kv_lens)
        return self.mixed(rows, page_table, ())

    def mixed(
        self, decodes: DecodeRows, page_table: Tensor, tasks: Sequence[PrefillTask]
    ) -> Tensor:
        """`Runner.mixed`. The pass goes before every other pass in later stages."""
        size = len(decodes)
        if tasks or not size:
            check_tasks(tasks, self.pool.layout.page_tokens)
        page_tokens = self.pool.layout.page_tokens
        tables = mixed_tables(decodes, page_table, tasks, page_tokens, self.remote)
        keeps_all = any(task.want_hidden for task in tasks)
        remote = remote_attention(self.remote, tables, self._shared)
        entry = self._begin("", tables, keeps_all=keeps_all, reports_layers=False)
        try:
            entry.is_served = remote is not None
            for _ in self._run_first(entry, tables, remote):
                pass
            self._serve(entry)
            if remote is not None:
                hand_out_lost(remote.end(), decodes, tasks)
            logits = self._finish(entry, tables, tasks, size, keeps_all=keeps_all)
        except BaseException:
            self.in_flight.give_up(entry)
            raise
        return logits

    def follow(self, page_table: PageTable) -> None:
        """`Runner.follow`."""
        self._first.follow(page_table)

    def capture_prefills(self) -> None:
        """`Runner.capture_prefills`."""
        self._first.capture_prefills()

    def project(self, hidden: Tensor) -> Tensor:
        """`Runner.project`."""
        return self._first.project(hidden)

    def copy_page(self, source: int, target: int) -> None:
        """`Runner.copy_page`: in the memory that all stages and ranks share, or stage by stage."""
        if self._own_pools:
            self.pool.require_held((source, target))
            self._first.copy_page(source, target)
            self.in_flight.copy_page(source, target)
            return
        self.pool.copy_page(source, target)
        others = self.storage[1:]
        others[:, :, target].copy_(others[:, :, source])

    def rest(self) -> None:
        """`Processes.rest` of the first stage's ranks; later stages see to theirs."""
        if self._first.processes is not None:
            self._first.processes.rest()

    def when_died(self, call: Callable[[EngineDied], None]) -> None:
        """`Processes.when_died`."""
        self.in_flight.when_died(call)
        if self._first.processes is not None:
            self._first.processes.when_died(call)

    def close(self) -> None:
        """Ends the later stages, and the ranks of the first."""
        if self._first.processes is not None:
            self._first.processes.close()
        self._stages.close()

    # -- passes

    def _steps(self, tasks: Sequence[PrefillTask], tables: RaggedTables) -> Generator[Boundary]:
        keeps_all = any(task.want_hidden for task in tasks)
        is_wanted = keeps_all or len(tables.rows) > 0
        entry = self._begin(
            tasks[0].name, tables, keeps_all=keeps_all, reports_layers=True, on_layer=_all_of(tasks)
        )
        try:
            yield from self._run_first(entry, tables)
            if not is_wanted and not any(task.awaits_kv for task in tasks):
                self.in_flight.leave(entry)
                return
            yield Boundary(self._first.model.layers.stop, "handed_on", entry.through)
            self.in_flight.wait(entry, self._timeout_s)
            if is_wanted:
                self._finish(entry, tables, tasks, 0, keeps_all=keeps_all)
            else:
                self.in_flight.end(entry)
        except BaseException:
            self.in_flight.give_up(entry)
            raise

    def _shared(self, link: RemoteLink) -> RemoteLink:
        return shared_link(self._first, link, own_pools=self._own_pools)

    def _serve(self, entry: PassInFlight) -> None:
        """Makes later stages' calls until the pass is through."""
        while entry.is_served:
            call = self.in_flight.next_call(self._timeout_s)
            if call is entry:
                entry.is_served = False
            elif isinstance(call, RemoteCall):
                self.in_flight.send(LinkReply(self._call_remote(call)), self._later_of[call.layer])
        self.in_flight.wait(entry, self._timeout_s)

    def _call_remote(self, call: RemoteCall) -> bool | tuple[PartialMessage, ...]:
        link = required(self.remote).link
        if call.q is None:
            return tuple(PartialMessage.of(part) for part in link.partials(call.layer))
        pages = self.storage[:, call.layer] if call.kv is None else call.kv.tensor()
        link.send(call.layer, call.q.tensor(), pages)
        return True

    def _ring_steps(self, task: RingTask) -> Generator[Boundary]:
        entry = self.in_flight.begin(task.name)
        try:
            self.in_flight.send(RingStart(entry.number, task.name, RingPass.of(task)))
            yield from self._first.ring(task, fetch=None, finish=self._hand_on(entry))
            for stage in range(self._stages.count):
                while (boundary := self._step(entry, stage, task.link)) is not None:
                    yield boundary
            if task.wants_rows:
                self.in_flight.wait(entry, self._timeout_s)
                self._finish_ring(entry, task)
                yield Boundary(self._layers, "lm_head")
        except BaseException:
            self.in_flight.give_up(entry)
            raise
        self.in_flight.end(entry)

    def _step(self, entry: PassInFlight, stage: int, link: RingLink) -> Boundary | None:
        """Runs one operator of a later stage, and makes the stage's calls of the link."""
        self.in_flight.send(Step(entry.number), stage)
        while True:
            call = self.in_flight.next_call()
            if isinstance(call, LinkCall):
                value = getattr(link, call.method)(call.argument)
                self.in_flight.send(LinkReply(bool(value)), stage)
            elif isinstance(call, Stepped) and call.number == entry.number:
                return Boundary(call.layer, call.operator) if call.operator else None

    def _finish_ring(self, entry: PassInFlight, task: RingTask) -> None:
        assert entry.rows is not None  # the task wants rows
        hidden = self._normed(entry.rows)
        if task.want_hidden:
            task.hidden = hidden
        if task.want_logits:
            task.logits = self.project(hidden[-1:])[0]

    def _normed(self, rows: Tensor) -> Tensor:
        """[r, H]: handed-back rows after the final norm."""
        norm = required(self.model.weights.final_norm)
        return kernels.rms_norm(rows.to(norm.device), norm, self.model.config.norm_eps)

    def _begin(
        self,
        name: str,
        tables: RaggedTables,
        *,
        keeps_all: bool,
        reports_layers: bool,
        on_layer: Callable[[int], None] = lambda layer: None,
    ) -> PassInFlight:
        later = range(self._first.model.layers.stop, self._layers)
        entry = self.in_flight.begin(name, on_layer, later if reports_layers else range(0))
        kv_only = not (keeps_all or len(tables.rows))
        what = PassStart(
            number=entry.number,
            name=name,
            tables=Tables.of(tables),
            is_cut=not keeps_all,
            kv_only=kv_only,
            reports_layers=reports_layers,
        )
        self.in_flight.send(what)
        return entry

    def _run_first(
        self, entry: PassInFlight, tables: RaggedTables, remote: RemoteAttention | None = None
    ) -> Generator[Boundary]:
        return self._first.run(
            tables,
            is_cut=False,
            kv_only=False,
            fetch=None,
            finish=self._hand_on(entry),
            remote=remote,
        )

    def _hand_on(self, entry: PassInFlight) -> Finish:
        def hand_on(state: Activations) -> None:
            try:
                self._out.send(entry.number, (state.x, required(state.residual)))
            except TransferError as error:
                raise self.in_flight.ending(error) from error
            entry.handed_on = True

        return hand_on

    def _finish(
        self,
        entry: PassInFlight,
        tables: RaggedTables,
        tasks: Sequence[PrefillTask],
        size: int,
        *,
        keeps_all: bool,
    ) -> Tensor:
        """Gives the tasks their rows; returns float32 [size, vocab] of the decodes."""
        hidden: Tensor | None = None
        logits = torch.empty(0, self.model.config.vocab_size, device=self.model.device)
        if entry.rows is not None:
            hidden = self._normed(entry.rows)
            logits = self.project(hidden[tables.rows] if keeps_all else hidden)
        self.in_flight.end(entry)
        hand_out(tasks, iter(logits[size:]), hidden if keeps_all else None, size)
        return logits[:size]


def _all_of(tasks: Sequence[PrefillTask]) -> Callable[[int], None]:
    def on_layer(layer: int) -> None:
        for task in tasks:
            task.on_layer(layer)

    return on_layer
