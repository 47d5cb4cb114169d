"""Begins the traces of requests at the proxy, and finds those of slow and failed requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from opentelemetry.trace import SpanKind

from millrace.proxy.errors import ApiError
from millrace.proxy.generation.objectives import missed
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.tracing.timeline import Timeline, own_spans
from millrace.proxy.tracing.waterfalls import RecentWaterfalls
from millrace.telemetry.tracing.context import TraceContext
from millrace.telemetry.tracing.tracer import NO_SCOPE, Scope, Tracer

#: The status of an answer whose client left.
_CLIENT_LEFT: Final = 499

#: Names the trace of a slow or failed request to the processes of its fleet.
Tell = Callable[[str], None]


class RequestTraces:
    """The traces of a proxy's requests. Used from the event loop only.

    A trace that is not sampled is still exported if a request of it was slow (an objective was
    missed), was migrated, or failed. The other processes hold their spans of it meanwhile.
    """

    def __init__(self, tracer: Tracer, recent: RecentWaterfalls) -> None:
        """`recent` keeps the waterfalls of all requests, traced or not."""
        self._tracer = tracer
        self._recent = recent

    def begin(self, traceparent: str, arrival_unix_s: float) -> tuple[Scope, str]:
        """Returns the scope of a request's first span, and the `traceparent` for other services:
        the client's own if traces are off.

        `traceparent`: the client's header; empty: none. A malformed header counts as none.
        """
        if self._tracer.is_on:
            scope = self._tracer.begin(traceparent, arrival_unix_s)
            return scope, scope.context.traceparent
        return NO_SCOPE, "" if TraceContext.parse(traceparent) is None else traceparent

    def late(self, request: ProxyRequest, tell: Tell) -> None:
        """Keeps the trace of a request whose first token came after its objective."""
        scope = request.trace
        if scope.records and not scope.context.sampled:
            self._keep(scope.context.trace_id, tell)

    def end(
        self,
        scope: Scope,
        requests: Sequence[ProxyRequest],
        error: ApiError | None,
        at: float,
        tell: Tell,
        *,
        handed_on: bool,
    ) -> None:
        """Keeps the waterfall of an HTTP request that arrived `at`, and records the proxy's spans
        of it, if they are wanted.

        `handed_on`: another replica continues it, and keeps the whole waterfall.
        """
        if not handed_on:
            self._recent.add(requests, "" if error is None else error.message)
        if not scope.records:
            return
        failed = error is not None and error.status != _CLIENT_LEFT
        if not scope.context.sampled:
            if not (failed or any(one.moves or missed(one) for one in requests)):
                return
            self._keep(scope.context.trace_id, tell)
        for request in requests:
            _record(scope, request)
        first = requests[0]
        scope.end(
            "request",
            0.0,
            time.monotonic() - at,
            {
                "millrace.request_id": first.request_id,
                "millrace.slo_class": first.slo.class_name,
                "millrace.tenant": first.spec.tenant,
                "millrace.prompts": len(requests),
                "millrace.missed": ", ".join(sorted({m for one in requests for m in missed(one)})),
            },
            error=error.message if error is not None and failed else "",
            kind=SpanKind.SERVER,
        )

    def _keep(self, trace_id: int, tell: Tell) -> None:
        if not self._tracer.wants(trace_id):
            self._tracer.keep([trace_id])
            tell(f"{trace_id:032x}")

    def close(self) -> None:
        self._tracer.close()


def _record(scope: Scope, request: ProxyRequest) -> None:
    named = {"millrace.request_id": request.request_id}
    for own in own_spans(Timeline.of(request)):
        more = {f"millrace.{key}": value for key, value in own.attributes.items()}
        scope.child(own.name, own.start_s, own.end_s, {**named, **more})
    for bar in request.waits:  # other services trace the other bars
        named_bar = {**named, "millrace.instance_id": bar.instance_id}
        scope.child(bar.name, bar.start_s, bar.end_s, named_bar)
