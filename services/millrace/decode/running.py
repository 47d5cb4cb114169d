"""Runs the batch, and adds and removes its requests between two steps."""

from __future__ import annotations

import time

from millrace.core.scheduler.reports import DecodeStarted
from millrace.decode.admissions import Admissions
from millrace.decode.memory.preemption import Preemption
from millrace.decode.memory.priority import in_danger
from millrace.decode.memory.swapping import Preempted, Swapper
from millrace.decode.metrics import DecodeMetrics
from millrace.decode.output.output import Output
from millrace.decode.request import DecodeEvent, DecodeRequest
from millrace.decode.request_table import RequestTable
from millrace.engine.decode_batch import DecodeBatch, TokenOut
from millrace.engine.device.decode_ahead import runs_ahead
from millrace.engine.kv.host_swap import KvSwap
from millrace.engine.sampling.sampler import Sampler
from millrace.instance.role import WorkerContext
from millrace.instance.tasks import Tasks


class Running:
    """The batch of a decode instance.

    `step` runs on the compute thread; every other method runs on the event loop, between steps.
    """

    def __init__(
        self,
        context: WorkerContext,
        table: RequestTable,
        admissions: Admissions,
        output: Output,
        metrics: DecodeMetrics,
        tasks: Tasks,
    ) -> None:
        engine, config = context.engine, context.config.engine
        self._send = context.send
        self._runner = engine.runner
        self._page_tokens = engine.layout.page_tokens
        self._max_batch = config.max_batch
        self._table = table
        self._admissions = admissions
        self._metrics = metrics
        self._step_time = context.decode_step
        sampler = Sampler(engine.grammars)
        self.batch = DecodeBatch(
            self._runner,
            engine.pool,
            sampler,
            max_batch=self._max_batch,
            runs_ahead=runs_ahead(config, engine.device),
            page_table=context.decode_table,
        )
        if context.decode_table is None:
            engine.runner.follow(self.batch.page_table)
        self._swapper = Swapper(
            KvSwap(engine.storage, config.swap_bytes, engine.layout.page_of_all_bytes, engine.swap),
            admissions.pages,
            tasks,
            metrics,
            vacate=admissions.receiver.release,
            wake=table.wake.set,
        )
        self._preemption = Preemption(
            table=table,
            batch=self.batch,
            pages=admissions.pages,
            swapper=self._swapper,
            waiting=admissions,
            metrics=metrics,
            move=output.preempt,
        )

    def step(self) -> list[TokenOut]:
        """Generates one token for every sequence of the batch."""
        begun = time.perf_counter()
        self._metrics.batch.observe(self.batch.size)
        outs = self.batch.step()
        self._metrics.step_s.observe(time.perf_counter() - begun)
        self._metrics.device_steps.follow(self._runner.states.steps)
        return outs

    def apply_changes(self) -> None:
        """Gives pages to requests that grow, removes ended requests from the batch, and adds ready
        requests as far as there is room."""
        if self._admissions.pages.may_grow:
            self._preemption.make_room()
        self._let_out()
        self._let_in()

    @property
    def owed_pages(self) -> int:
        """Free pages that requests of this instance will take before any new request."""
        return self._preemption.owed_pages

    def check_integrity(self) -> None:
        """Raises IntegrityError when the batch or host memory holds what belongs to no request."""
        self.batch.check_integrity()
        self._preemption.check_integrity()

    def close(self) -> None:
        """Ends the copies to and from host memory."""
        self._swapper.close()

    def _let_out(self) -> None:
        leaving, self._table.leaving = self._table.leaving, []
        for request in leaving:
            if not self._preemption.let_go(request):
                self._table.leaving.append(request)  # again after the copy that reads its pages
                continue
            self.batch.remove(request.id)
            self._admissions.release(request)

    def _let_in(self) -> None:
        """Adds requests in order of priority; no request overtakes a waiting request."""
        joining, ready = self._table.joining, self._preemption.ready()
        if not joining and not ready:
            return
        back = {preempted.request.id: preempted for preempted in ready}
        waiting = [request for request in joining if not request.ended]
        waiting += [preempted.request for preempted in ready]
        waiting.sort(key=self._preemption.priority)
        while waiting and self._has_place(waiting[0]):
            request = waiting.pop(0)
            self._enter(request, back.get(request.id))
        joining.clear()
        joining.extend(request for request in waiting if request.id not in back)

    def _enter(self, request: DecodeRequest, preempted: Preempted | None) -> None:
        request.advance(DecodeEvent.JOINED)
        if preempted is not None:
            self._preemption.back(preempted)
        if preempted is None or not preempted.sequences:
            self._join(request)
        else:
            for paused in preempted.sequences:
                self.batch.resume(paused)

    def _has_place(self, request: DecodeRequest) -> bool:
        """Says whether the batch has room for the request and the request may join now.

        A request that is not in danger waits while the step with it would take longer than the
        tightest pace of the running requests. A pace that a request would break alone does not
        count: no wait can save it.
        """
        size, more = self.batch.size, len(request.open_choices)
        if size + more > self._max_batch:
            return False
        if not size or self._step_time is None or in_danger(request, self._preemption.mean_away_s):
            return True
        tokens = self.batch.context_tokens + request.context_tokens
        step_s = self._step_time.seconds(size + more, tokens)
        running = (self._table.get(request_id) for request_id in self.batch.requests())
        slowed = (one for one in running if one is not None and one.pace_s < step_s)
        alone_s = self._step_time.seconds
        return all(alone_s(len(r.open_choices), r.context_tokens) > r.pace_s for r in slowed)

    def _join(self, request: DecodeRequest) -> None:
        is_partial = request.prompt_tokens % self._page_tokens > 0
        for sequence in request.sequences():
            if sequence.choice and is_partial:
                own = request.pages.own
                self._runner.copy_page(own[0][0], own[sequence.choice][0])
            self.batch.add(sequence)
        self._admissions.prefixes.joined(request)
        request.first_step_s = now_s = request.clock.now_s()
        if request.away_since_s is not None:
            request.trace.trace("wait_for_batch", request.away_since_s, now_s)
            request.away_since_s = None
        self._metrics.join_s.observe(request.first_step_s - request.first_token_s)
        since_token_s = request.first_step_s - request.first_token_s
        self._send(DecodeStarted(request_id=request.id, since_token_s=since_token_s))
