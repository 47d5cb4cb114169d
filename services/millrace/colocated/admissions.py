"""Admits requests to a mixed instance and its batch, and releases their memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from millrace.core.errors import CapacityError
from millrace.core.request_spec import RequestSpec
from millrace.core.scheduler.commands import AdmitDecode
from millrace.core.scheduler.reports import DecodeStarted, RequestFailed, RequestReleased
from millrace.decode.kvp.shards import SpreadRequests
from millrace.decode.memory.prefix import RequestPrefixes
from millrace.decode.memory.request_pages import RequestPages
from millrace.decode.metrics import DecodeMetrics
from millrace.decode.request import DecodeEvent, DecodeRequest
from millrace.decode.request_table import RequestTable
from millrace.engine.decode_batch import DecodeBatch
from millrace.engine.kv.prefix_cache import PrefixCache
from millrace.instance.prefix import prompt_blocks
from millrace.instance.role import WorkerContext
from millrace.instance.tasks import Tasks

#: Most tokens of spread prompts in a pass: this number, and the pool's tokens / `_SPILL_PART`,
#: since they spill into the pool.
_MOST_SPREAD_TOKENS: Final = 512
_SPILL_PART: Final = 8


class MixedAdmissions:
    """Owns the pages of requests. For the event loop; `let_in` and `release` between passes."""

    def __init__(
        self,
        context: WorkerContext,
        table: RequestTable,
        metrics: DecodeMetrics,
        tasks: Tasks,
        on_lost: Callable[[DecodeRequest, str], None],
    ) -> None:
        """`on_lost` gets each request that lost KV at a KVP worker, and the reason."""
        engine = context.engine
        self._id = context.incarnation.id
        self._tracer = context.tracer
        self._send = context.send
        self._runner = engine.runner
        self._grammars = engine.grammars
        self._page_tokens = engine.layout.page_tokens
        self._max_batch = context.config.engine.max_batch
        self._pages = RequestPages(context, may_grow=False)
        self._table = table
        self._metrics = metrics
        self._tasks = tasks
        self._prefixes = RequestPrefixes(context, metrics, tasks)
        room = engine.pool.num_pages * self._page_tokens // _SPILL_PART
        self.most_spread_tokens = max(1, min(_MOST_SPREAD_TOKENS, room))
        self.spread = SpreadRequests(
            context,
            self._shards_opened,
            on_lost,
            pass_tokens=self._max_batch + self.most_spread_tokens,
        )

    @property
    def prefix_cache(self) -> PrefixCache:
        return self._prefixes.cache

    # -- admission

    def admit(self, admit: AdmitDecode) -> None:
        """Reserves all pages of the request, or refuses the request at once if there are too few.

        All cached blocks of the prompt are used, even if the scheduler expected fewer or more.
        """
        self._grammars.begin(admit.request.sampling)
        request = self._table.get(admit.request.request_id)
        if request is not None:  # ended: its release report answers this, too
            request.attempt = admit.attempt
            return
        try:
            if len(admit.shards) > 1:
                self._admit_spread(admit)
            else:
                self._admit_whole(admit)
        except CapacityError as error:
            self._refuse(admit, str(error))

    def _admit_whole(self, admit: AdmitDecode) -> None:
        cached = self._cached(admit.request)
        request = DecodeRequest.of(admit, self._id, self._tracer)
        request.hold(self._pages.reserve(admit.request, cached))
        request.cached_tokens = len(cached) * self._page_tokens
        self._metrics.cached_tokens.inc(request.cached_tokens)
        self._table.add(request)

    def _admit_spread(self, admit: AdmitDecode) -> None:
        """Reserves pages for the first shard, and asks the KVP workers to reserve the others."""
        own, *others = admit.shards
        if why := self.spread.refusal(admit.request):
            raise CapacityError(why)
        request = DecodeRequest.of(admit, self._id, self._tracer)
        request.hold(self._pages.reserve_shard(admit.request, own.end_token))
        self._table.add(request)
        self.spread.open(request, others, sent_tokens=0)

    def _shards_opened(self, request: DecodeRequest) -> None:
        """Wakes the loop: the prompt can be computed, because all its shards have pages."""
        del request
        self._table.wake.set()

    def _cached(self, spec: RequestSpec) -> list[int]:
        """Takes cached pages of the prompt's first blocks; the last token is always computed.

        Takes none where hidden states of the whole prompt are needed: the cache has KV alone.
        """
        cache = self.prefix_cache
        if not cache.block_tokens or spec.needs_whole_prompt:
            return []
        most = (spec.prompt_tokens - 1) // cache.block_tokens
        return cache.take(prompt_blocks(spec, cache)[:most])

    def _refuse(self, admit: AdmitDecode, why: str) -> None:
        request_id, attempt = admit.request.request_id, admit.attempt
        self._metrics.failed.labels("capacity").inc()
        self._send(
            RequestFailed(request_id=request_id, message=why, retryable=True, attempt=attempt)
        )
        self._send(RequestReleased(request_id=request_id, attempt=attempt))

    # -- the batch

    def let_in(self, batch: DecodeBatch) -> None:
        """Adds requests with first tokens to the batch, in order, as far as it has room."""
        joining = self._table.joining
        while joining:
            request = joining[0]
            if not request.ended:
                if batch.size + len(request.open_choices) > self._max_batch:
                    break
                self._join(request, batch)
            joining.popleft()

    def _join(self, request: DecodeRequest, batch: DecodeBatch) -> None:
        request.advance(DecodeEvent.JOINED)
        own = request.pages.own
        for sequence in request.sequences():
            if sequence.choice and request.prompt_tokens % self._page_tokens:
                self._runner.copy_page(own[0][0], own[sequence.choice][0])
            batch.add(sequence)
        request.first_step_s = now_s = request.clock.now_s()
        if request.away_since_s is not None:
            request.trace.trace("wait_for_batch", request.away_since_s, now_s)
            request.away_since_s = None
        self._metrics.join_s.observe(request.first_step_s - request.first_token_s)
        self._send(DecodeStarted(request_id=request.id))

    # -- release

    def keep_prefix(self, request: DecodeRequest) -> None:
        """Caches the blocks of a computed prompt, for prompts with the same beginning."""
        if not request.ended:
            self._prefixes.keep(request)

    def release(self, request: DecodeRequest) -> None:
        """Frees the memory of a request that is in no batch, then reports to the scheduler."""
        if request.is_spread:
            self._tasks.spawn(self._release_spread(request))
        else:
            self._release(request)

    async def _release_spread(self, request: DecodeRequest) -> None:
        await self.spread.close(request)
        self._release(request)

    def _release(self, request: DecodeRequest) -> None:
        self._prefixes.keep(request)
        self._pages.release(request)
        self._table.remove(request)
        self._send(request.last_report())
