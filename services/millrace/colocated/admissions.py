"""A request's way into a mixed instance, into its batch and out of memory."""

from __future__ import annotations

from collections.abc import Sequence

from millrace.core.decode_placement import pages_needed
from millrace.core.errors import CapacityError
from millrace.decode.book import RequestBook
from millrace.decode.held_pages import HeldPages
from millrace.decode.metrics import DecodeMetrics
from millrace.decode.prefix import RequestPrefixes
from millrace.decode.request import DecodeRequest
from millrace.engine.decode_batch import DecodeBatch
from millrace.engine.prefix_cache import PrefixCache
from millrace.wire.pb import common_pb2, scheduler_pb2
from millrace.worker.host import WorkerContext
from millrace.worker.link import request_failed, request_released
from millrace.worker.prefix import prompt_blocks
from millrace.worker.tasks import Tasks


class MixedAdmissions:
    """Owns the pages. Used from the event loop, and `let_in` and `release` while no pass runs."""

    def __init__(
        self,
        context: WorkerContext,
        book: RequestBook,
        batch: DecodeBatch,
        metrics: DecodeMetrics,
        tasks: Tasks,
    ) -> None:
        self._send = context.send
        self._pool = context.engine.pool
        self._runner = context.engine.runner
        self._page_tokens = context.engine.layout.page_tokens
        self._max_batch = context.config.engine.max_batch
        self._book = book
        self._batch = batch
        self._metrics = metrics
        self._prefixes = RequestPrefixes(context, metrics, tasks)

    @property
    def prefix_cache(self) -> PrefixCache:
        return self._prefixes.cache

    # -- in

    def admit(self, admit: scheduler_pb2.AdmitDecode) -> None:
        """Reserves the pages of the request's whole life, or says at once that there are none.

        Its prompt begins with what of it is cached, however much the scheduler took that to be.
        """
        request = self._book.get(admit.request.request_id)
        if request is not None:  # that has ended: its release answers this too
            request.attempt = admit.attempt
            return
        if admit.shards:
            self._refuse(admit, "a mixed instance spreads no request over others", retryable=False)
            return
        cached = self._cached(admit.request)
        try:
            pages = self._reserve(admit.request, cached)
        except CapacityError as error:
            self._pool.free(cached)
            self._refuse(admit, str(error), retryable=True)
            return
        request = DecodeRequest.of(admit.request, pages, admit.attempt or 1)
        request.cached_tokens = len(cached) * self._page_tokens
        self._metrics.cached_tokens.inc(request.cached_tokens)
        self._book.add(request)

    def _cached(self, spec: common_pb2.RequestSpec) -> list[int]:
        """Pages of the prompt's first blocks, now held; the last token is computed in any case."""
        cache = self.prefix_cache
        if not cache.block_tokens:
            return []
        return cache.take(
            prompt_blocks(spec, cache)[: (spec.prompt_tokens - 1) // cache.block_tokens]
        )

    def _reserve(self, spec: common_pb2.RequestSpec, cached: Sequence[int]) -> HeldPages:
        n, prompt = spec.sampling.n, spec.prompt_tokens
        if n > self._max_batch:
            raise CapacityError(f"{n} choices wanted, the batch holds {self._max_batch}")
        needed = pages_needed(prompt, spec.sampling.max_tokens, n, self._page_tokens)
        pages = [*cached, *self._pool.allocate(needed - len(cached))]
        shared = prompt // self._page_tokens
        return HeldPages.of(pages, shared, dict.fromkeys(range(n), (needed - shared) // n))

    def _refuse(self, admit: scheduler_pb2.AdmitDecode, why: str, *, retryable: bool) -> None:
        request_id, attempt = admit.request.request_id, admit.attempt
        self._metrics.failed.labels("capacity").inc()
        self._send(request_failed(request_id, why, retryable=retryable, attempt=attempt))
        self._send(request_released(request_id, attempt=attempt))

    # -- the batch

    def let_in(self) -> None:
        """Who has its first tokens joins, as far as the batch has room."""
        joining = self._book.joining
        while joining:
            request = joining[0]
            if not request.ended:
                if self._batch.size + len(request.open_choices) > self._max_batch:
                    break
                self._join(request)
            joining.popleft()

    def _join(self, request: DecodeRequest) -> None:
        own = request.pages.own
        for sequence in request.sequences():
            if sequence.choice and request.prompt_tokens % self._page_tokens:
                self._runner.copy_page(own[0][0], own[sequence.choice][0])
            self._batch.add(sequence)
        request.first_step_s = request.clock.now_s()
        self._metrics.join_s.observe(request.first_step_s - request.first_token_s)
        started = scheduler_pb2.DecodeStarted(request_id=request.id)
        self._send(scheduler_pb2.WorkerMessage(decode_started=started))

    # -- out

    def keep_prefix(self, request: DecodeRequest) -> None:
        """Its prompt's blocks are there, for others that begin alike."""
        if not request.ended:
            self._prefixes.keep(request)

    def release(self, request: DecodeRequest) -> None:
        """Frees what an ended request holds, and tells the scheduler."""
        self._batch.remove(request.id)
        self._prefixes.keep(request)
        self._pool.free(request.pages.all())
        request.pages = HeldPages()
        self._book.remove(request)
        if request.finish_reason:
            finished = scheduler_pb2.RequestFinished(
                request_id=request.id,
                reason=request.finish_reason,
                generated_tokens=request.generated_tokens,
            )
            self._send(scheduler_pb2.WorkerMessage(request_finished=finished))
        else:
            self._send(request_released(request.id, attempt=request.attempt))
