"""Sends the results of prefill-only requests to their proxies, over the streams of tokens."""

from __future__ import annotations

from collections.abc import Callable

import grpc

from millrace.core.incarnation import Incarnation
from millrace.core.token_events import NO_DETAIL, PositionLogprobs, TokenDetail, TokenEvent
from millrace.instance.role import WorkerContext
from millrace.instance.tokens.servicer import TokenServicer
from millrace.instance.tokens.streams import TokenStreams
from millrace.prefill.job import PrefillJob
from millrace.prefill.metrics import PrefillMetrics
from millrace.wire.codec.token_events import encode_spans


class Results:
    """The results that this instance emits, as leader. Used from the event loop only."""

    def __init__(
        self,
        context: WorkerContext,
        metrics: PrefillMetrics,
        on_gone: Callable[[Incarnation], None],
    ) -> None:
        """`on_gone` is called when a proxy is lost: nobody waits for its results."""
        self._incarnation = context.incarnation
        self._metrics = metrics
        self._streams = TokenStreams(context.config.scheduler.lease_s, on_gone)

    def attach(self, server: grpc.aio.Server) -> None:
        TokenServicer(self._streams, self._incarnation).add_to(server)

    def send(self, job: PrefillJob, logprobs: tuple[PositionLogprobs | None, ...]) -> None:
        """Sends one event per choice; the first event has the result."""
        request = job.command.request
        self._metrics.answered.labels(request.pooling or "logprobs").inc()
        detail = TokenDetail(
            spans=encode_spans(job.trace.take()),
            prompt_logprobs=logprobs,
            cached_tokens=job.cached_tokens,
            pooled=job.hidden_pool.vector(job.prompt_tokens),
        )
        for choice in range(job.sampling.n):
            event = TokenEvent(
                request.request_id,
                choice,
                finish_reason="length",
                detail=NO_DETAIL if choice else detail,
                begins=choice == 0,
            )
            self._streams.publish(request.proxy, event)
