"""Admits requests, tracks the landing of their KV, and releases their memory."""

from __future__ import annotations

import logging
from dataclasses import replace

from millrace.core.arithmetic import ceil_div
from millrace.core.errors import CapacityError, MillraceError, TransferError
from millrace.core.scheduler.commands import AdmitDecode
from millrace.core.scheduler.reports import (
    FirstTokenSent,
    PrefixLanded,
    RequestFailed,
    RequestReleased,
)
from millrace.core.token_events import FinishedPrefill
from millrace.decode.kvp.shards import SpreadRequests
from millrace.decode.memory.prefix import RequestPrefixes
from millrace.decode.memory.request_pages import RequestPages
from millrace.decode.metrics import DecodeMetrics
from millrace.decode.output.output import Output
from millrace.decode.request import DecodeEvent, DecodeRequest
from millrace.decode.request_table import RequestTable
from millrace.instance.role import WorkerContext
from millrace.instance.shards.shard_table import ShardTable
from millrace.instance.spans import of_request
from millrace.instance.tasks import Tasks
from millrace.transfer.push.control import ReceiveCallbacks
from millrace.transfer.push.receive.manager import ReceiveManager

log = logging.getLogger(__name__)


class Admissions:
    """Admits and releases a decode instance's requests; owns the KV receiver."""

    def __init__(
        self,
        context: WorkerContext,
        table: RequestTable,
        output: Output,
        metrics: DecodeMetrics,
        tasks: Tasks,
        hosted: ShardTable,
    ) -> None:
        """`hosted`: shards of other instances' requests, whose KV the same receiver receives."""
        self._id = context.incarnation.id
        self._hosted = hosted
        self._tracer = context.tracer
        self._send = context.send
        self._store = context.store
        self._engine = context.engine
        self._page_tokens = context.engine.layout.page_tokens
        grows = context.config.scheduler.decode_reserve == "grow"
        self.pages = RequestPages(context, may_grow=grows)
        self._waiting: dict[str, AdmitDecode] = {}
        self.prefixes = RequestPrefixes(context, metrics, tasks)
        self._table = table
        self._output = output
        self._metrics = metrics
        self._tasks = tasks
        self.receiver = ReceiveManager(
            transport=context.transport,
            layout=context.engine.layout,
            storage=context.engine.storage,
            identity=context.incarnation,
            config=context.config.transfer,
            callbacks=hosted.beside(
                ReceiveCallbacks(
                    on_first_tokens=self._first_tokens,
                    on_landed=self._landed,
                    on_prefix=self._prefix_landed,
                    on_failed=self._receive_failed,
                ),
                context.on_corrupt,
            ),
        )
        self.spread = SpreadRequests(
            context,
            table.join_if_ready,
            self._shard_lost,
            pass_tokens=context.config.engine.max_batch,  # one per sequence
        )

    # -- admission

    def admit(self, admit: AdmitDecode) -> None:
        """Admits a new request, or another attempt at a request whose first tokens were kept."""
        self._engine.grammars.begin(admit.request.sampling)
        request = self._table.get(admit.request.request_id)
        if request is not None:
            request.attempt = admit.attempt  # an ended request's release report answers this, too
            if not request.ended:
                self._rewind(request, admit)
        else:
            self._admit_new(admit)

    def _admit_new(self, admit: AdmitDecode) -> None:
        """Reserves the request's pages, or refuses the request at once if there are none. If
        requests may grow, the request waits for pages instead.

        Kept tokens that no earlier attempt left here come from the prefix cache.

        An earlier attempt's KV owner may have asked for a shard here after the scheduler's cancel.
        """
        if (shard := self._hosted.get(admit.request.request_id)) is not None:
            shard.lose("another attempt begins here")
            self._refuse(admit, "a shard of an earlier attempt is still here", "transfer")
            return
        try:
            self._check(admit)
            request = DecodeRequest.of(admit, self._id, self._tracer)
            if not self.pages.may_grow:
                self._take_pages(request, admit)
        except TransferError as error:
            self._refuse(admit, str(error), "transfer")
            return
        except CapacityError as error:
            self._refuse(admit, str(error), "capacity")
            return
        self._table.add(request)
        if self.pages.may_grow:
            self._waiting[request.id] = admit
            self._table.wake.set()
        else:
            self._expect(request, admit)

    def _check(self, admit: AdmitDecode) -> None:
        """Raises CapacityError for a request that could not be held even by an empty instance."""
        if not _is_spread(admit):
            self.pages.check(admit.request)
            return
        if why := self.spread.refusal(admit.request):
            raise CapacityError(why)
        self.pages.check_shard(admit.request, admit.shards[0].end_token)

    def _take_pages(self, request: DecodeRequest, admit: AdmitDecode) -> None:
        """Reserves the request's pages, or those of its first shard. Raises TransferError and
        CapacityError, and takes none."""
        if _is_spread(admit):
            request.hold(self.pages.reserve_shard(request.spec, admit.shards[0].end_token))
            return
        request.hold(self.pages.reserve(request.spec, self.prefixes.take(admit)))
        self.prefixes.found(request, admit.kept_tokens)

    def _expect(self, request: DecodeRequest, admit: AdmitDecode) -> None:
        """Admits the prompt's KV at the receiver, and asks KVP workers to hold the shards after the
        first."""
        end, others = request.prompt_tokens, admit.shards[1:]
        if others:
            end = min(admit.shards[0].end_token, end)
        self.receiver.admit(
            request.id,
            request.pages.of_choice(0)[: ceil_div(end, self._page_tokens)],
            request.prompt_tokens,
            request.attempt,
            kept_tokens=request.cached_tokens,
            shard=(0, end) if others else None,
        )
        if others:
            self.spread.open(request, others, request.prompt_tokens)
        self._fetch_if_needed(request)

    # -- admission of requests that wait for pages

    def waiting(self) -> list[DecodeRequest]:
        """Lists the requests without pages, whose senders wait."""
        return [r for r in map(self._table.live, self._waiting) if r is not None]

    def wanted(self, request: DecodeRequest) -> int:
        """Returns the number of pages that a waiting request takes."""
        admit = self._waiting[request.id]
        if _is_spread(admit):
            return self.pages.wanted_shard(request.spec, admit.shards[0].end_token)
        return self.pages.wanted(request.spec)

    def let_in(self, request: DecodeRequest) -> None:
        """Reserves the pages of a waiting request; enough pages must be free."""
        admit = self._waiting.pop(request.id)
        try:
            self._take_pages(request, admit)
        except TransferError as error:
            self._output.fail(request, str(error), "transfer")
        else:
            request.trace.trace("wait_for_pages", request.admitted_s, request.clock.now_s())
            self._expect(request, admit)

    def _fetch_if_needed(self, request: DecodeRequest) -> None:
        if request.sampling.needs_prompt_ids:
            self._tasks.spawn(self._fetch_prompt(request))

    def _rewind(self, request: DecodeRequest, admit: AdmitDecode) -> None:
        try:
            if request.streams:
                raise TransferError(f"request {request.id} has begun to stream")
            self.receiver.rewind(request.id, admit.attempt, admit.kept_tokens)
        except TransferError as error:
            self._output.fail(request, str(error), "transfer")

    def _refuse(self, admit: AdmitDecode, message: str, reason: str) -> None:
        request_id, attempt = admit.request.request_id, admit.attempt
        self._metrics.failed.labels(reason).inc()
        self._send(
            RequestFailed(request_id=request_id, message=message, retryable=True, attempt=attempt)
        )
        self._send(RequestReleased(request_id=request_id, attempt=attempt))

    async def _fetch_prompt(self, request: DecodeRequest) -> None:
        try:
            request.prompt_ids = await self._store.prompt_ids(request.id, 0, request.prompt_tokens)
        except MillraceError as error:
            self._output.fail(request, str(error), "store")
        else:
            self._table.join_if_ready(request)

    # -- the receiver's callbacks

    def _first_tokens(self, request_id: str, finished: FinishedPrefill) -> None:
        request = self._table.live(request_id)
        if request is None:
            return
        request.start_choices([first.token_id for first in finished.first_tokens])
        request.transfer = next((s for s in finished.spans if s.name == "kv_transfer"), None)
        self._output.first_tokens(request, finished)
        self._send(FirstTokenSent(request_id=request_id))
        self._table.join_if_ready(request)

    def _landed(self, request_id: str) -> None:
        request = self._table.live(request_id)
        if request is None:
            return
        request.advance(DecodeEvent.KV_LANDED)
        now_s = request.clock.now_s()
        if request.transfer is not None:
            # Where nothing was written yet, the sender gave the end of its prefill as the start.
            begun = max(request.transfer.start_s, request.admitted_s)
            end_s = max(now_s, begun)
            request.trace.spans.append(replace(request.transfer, start_s=begun, end_s=end_s))
            request.trace.trace("kv_transfer", begun, end_s, sender=request.transfer.instance_id)
        else:
            request.trace.add("kv_transfer", request.admitted_s, now_s)
        self._table.join_if_ready(request)

    def _prefix_landed(self, request_id: str, attempt: int, tokens: int) -> None:
        request = self._table.live(request_id)
        if request is not None and request.may_continue:
            self._send(PrefixLanded(request_id=request_id, attempt=attempt, tokens=tokens))

    def _receive_failed(
        self, request_id: str, message: str, attempt: int, kept_tokens: int
    ) -> None:
        """Fails the request. If a prefix is kept, the scheduler decides: another attempt, or a
        cancel."""
        request = self._table.live(request_id)
        if request is None:
            return
        if not kept_tokens or not request.may_continue:
            self._output.fail(request, message, "transfer")
            return
        what, about = "request %s: %s; %d tokens are kept", of_request(request.spec)
        log.warning(what, request_id, message, kept_tokens, extra=about)
        self._metrics.failed.labels("transfer").inc()
        self._send(
            RequestFailed(
                request_id=request_id,
                message=message,
                retryable=True,
                attempt=attempt,
                kept_tokens=kept_tokens,
            )
        )

    def _shard_lost(self, request: DecodeRequest, why: str) -> None:
        self._output.fail(request, why, "transfer")

    # -- release

    def release(self, request: DecodeRequest) -> None:
        """Frees the memory of a request that is in no batch, then reports to the scheduler."""
        self._waiting.pop(request.id, None)
        self._tasks.spawn(self._release(request))

    async def _release(self, request: DecodeRequest) -> None:
        """Frees the pages when no write can reach them any more."""
        await self.spread.close(request)
        await self.receiver.release(request.id)
        self.prefixes.keep(request)
        self.pages.release(request)
        self._table.remove(request)
        self._send(request.last_report())


def _is_spread(admit: AdmitDecode) -> bool:
    return len(admit.shards) > 1
