"""Sends tokens to the proxy and the journal, and ends requests."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Many

from millrace.core.incarnation import Incarnation
from millrace.core.scheduler.reports import RequestFailed
from millrace.core.token_events import FinishedPrefill, TokenDetail, TokenEvent
from millrace.decode.metrics import DecodeMetrics
from millrace.decode.output.journal import Journal
from millrace.decode.output.token_events import first_token_events, step_event
from millrace.decode.request import DecodeEvent, DecodeRequest
from millrace.decode.request_table import RequestTable
from millrace.engine.decode_batch import TokenOut
from millrace.engine.sampling.spec import finish_reason
from millrace.instance.role import WorkerContext
from millrace.instance.spans import of_request
from millrace.instance.tokens.streams import TokenStreams
from millrace.wire.codec.token_events import encode_spans
from millrace.wire.moves import PREEMPTED

log = logging.getLogger(__name__)

#: Failures of this instance: a streaming request is migrated after them.
_OF_THIS_PLACE = frozenset({"store", "transfer"})
#: Failures after which another attempt would fail, too, or is not wanted.
_FINAL = frozenset({"compute", "evicted"})
#: Errors of this instance. Prefill reports those of a transfer.
_OF_COMPUTE = frozenset({"compute", "logits"})


class Output:
    """The output of a decode instance: `streams` and `journal` take the tokens; ended requests
    leave through the request table."""

    def __init__(self, context: WorkerContext, table: RequestTable, metrics: DecodeMetrics) -> None:
        self._send = context.send
        self._table = table
        self._metrics = metrics
        self.streams = TokenStreams(context.config.scheduler.lease_s, self._proxy_gone)
        self.journal = Journal(context.store, context.config.store.journal_interval_ms / 1e3)

    # -- tokens

    def first_tokens(self, request: DecodeRequest, finished: FinishedPrefill) -> None:
        """Sends the first tokens, sampled by prefill, one per choice; or the result of a
        prefill-only request, which ends it."""
        for event in first_token_events(request, finished):
            reason = "length"
            if event.token_ids:
                reason = finish_reason(request.sampling, 1, event.token_ids[0])
            self._emit(request, event, reason)

    def step_tokens(self, outs: Many[TokenOut], batch: int) -> None:
        """Sends the tokens of a step of `batch` sequences; skips requests that have ended."""
        for out in outs:
            request = self._table.live(out.request_id)
            if request is None:
                continue
            if out.finish_reason == "lost":
                self.fail(request, out.error, "transfer")
                continue
            if out.error:
                self.fail(request, out.error, "logits")
                continue
            request.stepped(batch)
            self._emit(request, step_event(out), out.finish_reason)

    def _emit(self, request: DecodeRequest, event: TokenEvent, reason: str) -> None:
        request.generated_tokens += len(event.token_ids)
        if event.choice == 0:
            request.answer_ids.extend(event.token_ids)
        self._metrics.tokens.inc(len(event.token_ids))
        if reason:
            request.open_choices.discard(event.choice)
            event = event._replace(
                finish_reason=reason,
                stop_token_id=event.token_ids[-1] if reason == "stop" else -1,
            )
            if not request.open_choices:
                detail = event.detail()
                spans = (*detail.spans, *encode_spans(request.trace.take()))
                event = event._replace(detail=detail._replace(spans=spans))
        self.streams.publish(request.proxy, event)
        if event.token_ids:
            start = request.emitted(event.choice, len(event.token_ids))
            self.journal.add(request.id, event.choice, start, event.token_ids)
        if not request.open_choices and not request.ended:
            request.finish_reason = reason
            self._table.leave(request)

    # -- ends before the last token

    def fail(self, request: DecodeRequest, message: str, reason: str) -> None:
        """Ends a failed request and reports it to the scheduler at once. Before the first token,
        another attempt may be made; after it, the request is migrated if the failure is of this
        instance alone."""
        if request.ended:
            return
        log.warning("request %s: %s", request.id, message, extra=of_request(request.spec))
        self._metrics.failed.labels(reason).inc()
        if request.streams and reason in _OF_THIS_PLACE:
            self.move(request)
            return
        retryable = not request.streams and reason not in _FINAL
        self._send(
            RequestFailed(
                request_id=request.id,
                message=message,
                retryable=retryable,
                attempt=request.attempt,
                prompt_unread=reason == "store",
                fault="compute" if reason in _OF_COMPUTE else "",
            )
        )
        spoiled = reason == "logits"
        event = DecodeEvent.SPOILED if spoiled else DecodeEvent.ENDED
        self._table.leave(request, event, error=message)

    def move(self, request: DecodeRequest) -> None:
        """Ends the request here. A request with tokens out is migrated: its proxy has the tokens.
        A request without tokens is retried by the scheduler."""
        self._move(request, "")

    def preempt(self, request: DecodeRequest) -> None:
        """Ends the request here, as `move` does, to free pages; the request may return to this
        instance and be preempted again."""
        self._move(request, PREEMPTED)

    def _move(self, request: DecodeRequest, error: str) -> None:
        if not request.streams:
            self._table.leave(request)
            return
        request.finish_reason = "moved"
        detail = TokenDetail(error=error, spans=encode_spans(request.trace.take()))
        self._table.leave(request)  # first: an event too many ends all requests of a proxy
        event = TokenEvent(request.id, finish_reason="moved", detail=detail)
        self.streams.publish(request.proxy, event)

    def evict(self, *, abort: bool) -> None:
        """Ends every request: with `abort` by an error, else by migration or retry."""
        log.info("evicting %d requests, abort %s", len(self._table), abort)
        for request in self._table:
            if abort:
                self.fail(request, "the instance had to let go of its requests", "evicted")
            else:
                self.move(request)

    def cancel(self, request: DecodeRequest) -> None:
        """Ends a request whose result nobody waits for."""
        self._metrics.cancelled.inc(not request.ended)
        self._table.leave(request)

    def _proxy_gone(self, proxy: Incarnation) -> None:
        """Lets the requests of a proxy go that reads no tokens; if it lives, it migrates them."""
        for request in self._table:
            if request.proxy == proxy and not request.ended:
                about = of_request(request.spec)
                log.warning(
                    "request %s: proxy %s reads no tokens", request.id, proxy.id, extra=about
                )
                self.move(request)
