"""What runs: the batch, and all that changes in it between two steps."""

from __future__ import annotations

import time

from millrace.decode.admissions import Admissions
from millrace.decode.book import RequestBook
from millrace.decode.metrics import DecodeMetrics
from millrace.decode.request import DecodeRequest
from millrace.engine.decode_batch import DecodeBatch, TokenOut
from millrace.engine.sampler import Sampler
from millrace.wire.pb import scheduler_pb2
from millrace.worker.host import WorkerContext


class Running:
    """`step` runs on the compute thread, and all else on the event loop while no step does."""

    def __init__(
        self,
        context: WorkerContext,
        book: RequestBook,
        admissions: Admissions,
        metrics: DecodeMetrics,
    ) -> None:
        self._send = context.send
        self._runner = context.engine.runner
        self._page_tokens = context.engine.layout.page_tokens
        self._max_batch = context.config.engine.max_batch
        self._book = book
        self._admissions = admissions
        self._metrics = metrics
        self.batch = DecodeBatch(
            self._runner, context.engine.pool, Sampler(), max_batch=self._max_batch
        )

    def step(self) -> list[TokenOut]:
        """One token for every sequence of the batch."""
        begun = time.perf_counter()
        self._metrics.batch.observe(self.batch.size)
        outs = self.batch.step()
        self._metrics.step_s.observe(time.perf_counter() - begun)
        return outs

    def apply_changes(self) -> None:
        """Lets out who has ended, and in who is ready, as far as the batch has room."""
        self._let_out()
        self._let_in()

    def _let_out(self) -> None:
        for request in self._book.leaving:
            self.batch.remove(request.id)
            self._admissions.release(request)
        self._book.leaving.clear()

    def _let_in(self) -> None:
        joining = self._book.joining
        while joining:
            request = joining[0]
            if not request.ended:
                if self.batch.size + len(request.open_choices) > self._max_batch:
                    break
                self._join(request)
            joining.popleft()

    def _join(self, request: DecodeRequest) -> None:
        is_partial = request.prompt_tokens % self._page_tokens > 0
        for sequence in request.sequences():
            if sequence.choice and is_partial:
                own = request.pages.own
                self._runner.copy_page(own[0][0], own[sequence.choice][0])
            self.batch.add(sequence)
        self._admissions.prefixes.joined(request)
        request.first_step_s = request.clock.now_s()
        self._metrics.join_s.observe(request.first_step_s - request.first_token_s)
        started = scheduler_pb2.DecodeStarted(request_id=request.id)
        self._send(scheduler_pb2.WorkerMessage(decode_started=started))
