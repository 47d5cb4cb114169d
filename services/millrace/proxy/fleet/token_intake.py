"""Takes what decode instances send: tokens, and the begins and ends of their streams."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence

from millrace.core.incarnation import Incarnation
from millrace.core.token_events import TokenEvent
from millrace.proxy.errors import ApiError
from millrace.proxy.fleet.migration import BROKEN, LOST, FailRequest, Migration
from millrace.proxy.generation.objectives import missed
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.generation.stage import Stage
from millrace.proxy.metrics import ModelMetrics
from millrace.wire.moves import PREEMPTED

log = logging.getLogger(__name__)

#: Finish reasons of an instance that will not finish the answer.
_BROKEN_OFF = frozenset({"error", "cancelled", "moved"})

#: Stages of a request whose tokens come from `decode`.
_AT_DECODE = (Stage.PLACED, Stage.UNPLACED, Stage.STREAMING)
#: Stages of a request that the scheduler may have placed elsewhere since its last message.
_WITHOUT_TOKENS = (Stage.SUBMITTED, Stage.QUEUED, Stage.PLACED, Stage.UNPLACED)


class TokenIntake:
    """Gives tokens to the open requests, and migrates requests whose tokens are lost."""

    def __init__(
        self,
        live: Mapping[str, ProxyRequest],
        migration: Migration,
        metrics: ModelMetrics,
        *,
        fail: FailRequest,
        finish: Callable[[ProxyRequest], None],
    ) -> None:
        self._live = live
        self._migration = migration
        self._metrics = metrics
        self._fail = fail
        self._finish = finish
        #: Gets every request whose first token came after its objective.
        self.on_late: Callable[[ProxyRequest], None] = lambda request: None

    def on_batch(self, decode: Incarnation, events: Sequence[TokenEvent]) -> None:
        now = time.monotonic()
        live, tbt = self._live, self._metrics.tbt
        tokens = 0
        for event in events:
            request = live.get(event.request_id)
            if request is None:
                continue
            if not self._counts(request, decode, event):
                if request.stage is not Stage.STREAMING and request.decode != decode:
                    request.keep(decode, event)  # the request may be placed at this instance
                continue
            begins_again = event.begins and request.stage is Stage.STREAMING
            if begins_again or event.finish_reason in _BROKEN_OFF:
                self._broken_off(request, event)
                continue
            tokens += len(event.token_ids)
            try:
                gap = request.take(event, now)
            except Exception:  # a defect in one request must not end the stream of all requests
                what = "request %s: tokens could not be taken"
                log.exception(what, event.request_id, extra=request.about())
                self._fail(request, ApiError(500, "Internal error."), cancel=True)
                continue
            if gap is not None:
                tbt.observe(gap)
            if request.first_token_at == now and missed(request):
                self.on_late(request)
            if request.has_ended:
                self._finish(request)
        self._metrics.tokens.inc(tokens)

    def _broken_off(self, request: ProxyRequest, event: TokenEvent) -> None:
        """Migrates or fails a request whose instance does not finish it, or begins it again.

        It begins again if a scheduler that took over had not heard of its tokens: all of them would
        come twice.
        """
        detail = event.detail()
        if event.begins:
            self._migration.move(request, ApiError(500, LOST, code="failed"), "lost")
        elif event.finish_reason == "moved":
            request.note(detail.spans)
            preempted = detail.error == PREEMPTED
            request.preemptions += preempted
            reason = PREEMPTED if preempted else "moved"
            self._migration.move(request, ApiError(500, LOST, code="failed"), reason)
        else:
            message = detail.error or "The request was cancelled by the server."
            self._fail(request, ApiError(500, message, code="failed"), cancel=True)

    def on_stream_up(self, decode: Incarnation, *, lost: bool) -> None:
        """Migrates the requests whose tokens may be among those that were lost with a stream.

        Where none were lost, requests that wait for tokens of this instance will get them. Where
        some were, a request that turns out to be placed here later is migrated then.
        """
        for request in list(self._live.values()):
            here = request.decode == decode
            if lost and (request.has_kept(decode) or (here and request.stage in _AT_DECODE)):
                self._migration.lose(request, ApiError(500, BROKEN, code="failed"))
            elif here and request.stage is Stage.UNPLACED:
                request.stage = Stage.PLACED
            elif lost and request.stage in _WITHOUT_TOKENS:
                request.keep(decode, TokenEvent(request.spec.request_id, finish_reason="moved"))

    def on_tokens_lost(self, decode: Incarnation) -> None:
        for request in list(self._live.values()):
            if request.has_kept(decode) or (
                request.decode == decode and request.stage is Stage.STREAMING
            ):
                self._migration.lose(request, ApiError(500, BROKEN, code="failed"))
            elif request.decode == decode and request.stage is Stage.PLACED:
                # If the instance died, the scheduler places the request again. Otherwise the next
                # stream tells whether tokens were lost.
                request.stage = Stage.UNPLACED
                request.waiting_since = time.monotonic()

    def _counts(self, request: ProxyRequest, decode: Incarnation, event: TokenEvent) -> bool:
        """Whether an event of this instance counts for the request. Tokens count from the first of
        an attempt on: others are of an attempt whose first tokens did not count.
        """
        starts = event.begins or event.finish_reason in _BROKEN_OFF
        if request.decode == decode:
            may_start = starts and request.stage is not Stage.UNPLACED
            return may_start or request.stage is Stage.STREAMING
        if request.decode is None and starts:  # its Placed is still on the way
            request.place(decode, 0.0, time.monotonic())
            return True
        return False
