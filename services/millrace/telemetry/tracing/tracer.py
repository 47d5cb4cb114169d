"""Records the spans of requests in one process, and decides which traces are exported.

A trace is exported if its `traceparent` has the sampled flag. The proxy sets the flag: as the
client's own `traceparent` says, else by `telemetry.trace_ratio`. Every process holds the spans of
other traces for a while (`tail.py`). When the proxy finds a request slow or failed, it names the
trace to all processes (`keep`), and they export what they hold of it.

Spans are recorded when they end, with their times: no span is open in the hot paths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from opentelemetry.sdk.trace import SpanProcessor
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace import SpanKind
from prometheus_client import Histogram

from millrace.core.config import TelemetryConfig
from millrace.telemetry.metrics import Registry
from millrace.telemetry.otlp.collector import resource
from millrace.telemetry.tracing.context import TraceContext
from millrace.telemetry.tracing.exporters import FileSpans, OtlpSpans
from millrace.telemetry.tracing.finished import (
    NO_ATTRIBUTES,
    Attributes,
    FinishedSpan,
    Moment,
)
from millrace.telemetry.tracing.tail import TailBuffer

_EXPORT_EVERY_MS: Final = 1000
_MOST_QUEUED_SPANS: Final = 16_384


class Scope:
    """One span of a request and the spans directly below it. On any thread.

    All times are in seconds since the request's arrival at the proxy. The span itself is recorded
    by `end`, after its children.
    """

    __slots__ = ("_arrival_ns", "_tracer", "context", "parent_id")

    def __init__(
        self, tracer: Tracer | None, context: TraceContext, parent_id: int, arrival_unix_s: float
    ) -> None:
        """`context` names the scope's own span. Without a tracer nothing is recorded."""
        self._tracer = tracer
        self._arrival_ns = round(arrival_unix_s * 1e9)
        self.context = context
        self.parent_id = parent_id

    @property
    def records(self) -> bool:
        """Whether spans are recorded, to be exported or held for the tail."""
        return self._tracer is not None

    @property
    def exemplar(self) -> dict[str, str] | None:
        """Returns the labels of a metric's exemplar; None if the trace is not sampled."""
        return self.exemplar_of(kept=False)

    def exemplar_of(self, *, kept: bool) -> dict[str, str] | None:
        """Works as `exemplar`; `kept`: the trace is exported though it may not be sampled."""
        if self._tracer is None or not (kept or self.context.sampled):
            return None
        return {"trace_id": f"{self.context.trace_id:032x}"}

    def child(
        self,
        name: str,
        start_s: float,
        end_s: float,
        attributes: Attributes | Callable[[], Attributes] = NO_ATTRIBUTES,
        moments: Sequence[tuple[str, float, Attributes]] = (),
    ) -> None:
        """Records a span below this one. `moments` are (name, s since the arrival, attributes)."""
        if self._tracer is None:
            return
        span = FinishedSpan(
            self.context.trace_id,
            self._tracer.new_span_id(),
            self.context.span_id,
            name,
            self._at_ns(start_s),
            self._at_ns(max(start_s, end_s)),
            attributes,
            tuple(Moment(moment, self._at_ns(at_s), more) for moment, at_s, more in moments),
        )
        self._tracer.record(span, sampled=self.context.sampled)

    def end(
        self,
        name: str,
        start_s: float,
        end_s: float,
        attributes: Attributes = NO_ATTRIBUTES,
        *,
        error: str = "",
        kind: SpanKind = SpanKind.INTERNAL,
    ) -> None:
        """Records the scope's own span; `error` is empty unless it failed."""
        if self._tracer is None:
            return
        span = FinishedSpan(
            *(self.context.trace_id, self.context.span_id, self.parent_id, name),
            *(self._at_ns(start_s), self._at_ns(max(start_s, end_s)), attributes),
            error=error,
            kind=kind,
        )
        self._tracer.record(span, sampled=self.context.sampled)

    def _at_ns(self, since_arrival_s: float) -> int:
        """Returns a Unix time in ns. (Added as integers: a double's steps at today's Unix time are
        240 ns.)
        """
        return self._arrival_ns + round(since_arrival_s * 1e9)


NO_SCOPE: Final = Scope(None, TraceContext(0, 0, False), 0, 0.0)


class Tracer:
    """Makes the scopes of a process's requests; without a processor, none of them records."""

    def __init__(
        self,
        processors: Sequence[SpanProcessor],
        *,
        ratio: float = 1.0,
        tail_spans: int = 0,
        registry: Registry | None = None,
    ) -> None:
        """`tail_spans`: the most spans of unsampled traces that are held; 0: none. `registry` gets
        the histogram of the times of spans.
        """
        self._processors = tuple(processors)
        self._ids = RandomIdGenerator()
        self._bound = TraceIdRatioBased(ratio).bound
        self._tail = TailBuffer(tail_spans) if tail_spans else None
        self.new_span_id = self._ids.generate_span_id
        self._times: dict[str, Histogram] = {}
        self._seconds: Histogram | None = None
        if registry is not None:
            self._seconds = registry.histogram(
                "millrace_trace_span_seconds",
                "times of the spans that were recorded, by name: of sampled requests, or with "
                "telemetry.trace_tail_spans of all",
                ["span"],
            )

    @property
    def is_on(self) -> bool:
        return bool(self._processors)

    @property
    def has_tail(self) -> bool:
        """Whether a trace that was not sampled can still be exported."""
        return self.is_on and self._tail is not None

    def begin(self, traceparent: str, arrival_unix_s: float) -> Scope:
        """Returns the scope of a request's first span, at the proxy: below the client's span, or
        the root of a new trace.
        """
        if not self.is_on:
            return NO_SCOPE
        span_id = self.new_span_id()
        if (above := TraceContext.parse(traceparent)) is not None:
            context, parent_id = above._replace(span_id=span_id), above.span_id
        else:
            trace_id = self._ids.generate_trace_id()
            sampled = trace_id & TraceIdRatioBased.TRACE_ID_LIMIT < self._bound
            context, parent_id = TraceContext(trace_id, span_id, sampled), 0
        tracer = self if context.sampled or self.has_tail else None
        return Scope(tracer, context, parent_id, arrival_unix_s)

    def scope(self, traceparent: str, arrival_unix_s: float) -> Scope:
        """Returns the scope of this process's part of a request, below the proxy's span."""
        above = TraceContext.parse(traceparent) if self.is_on else None
        if above is None or not (above.sampled or self.has_tail):
            return NO_SCOPE
        context = above._replace(span_id=self.new_span_id())
        return Scope(self, context, above.span_id, arrival_unix_s)

    def record(self, span: FinishedSpan, *, sampled: bool) -> None:
        """Takes a span that has ended; never waits."""
        if self._seconds is not None:
            self._observe(span, self._seconds, sampled=sampled)
        if sampled or (self._tail is not None and self._tail.put(span)):
            self._export(span)

    def _observe(self, span: FinishedSpan, seconds: Histogram, *, sampled: bool) -> None:
        times = self._times.get(span.name)
        if times is None:  # looking up a label costs more than observing
            times = self._times[span.name] = seconds.labels(span.name)
        exemplar = {"trace_id": f"{span.trace_id:032x}"} if sampled else None
        times.observe((span.end_ns - span.start_ns) / 1e9, exemplar)

    def keep(self, trace_ids: Sequence[int]) -> None:
        """Exports all held spans of these traces, and their later spans."""
        if self._tail is not None and self.is_on:
            for trace_id in trace_ids:
                for span in self._tail.want(trace_id):
                    self._export(span)

    def wants(self, trace_id: int) -> bool:
        """Whether `keep` was called for the trace lately."""
        return self._tail is not None and self._tail.wants(trace_id)

    def _export(self, span: FinishedSpan) -> None:
        if callable(span.attributes):  # what it reads may change before the export
            span = span._replace(attributes=span.computed())
        for processor in self._processors:
            processor.on_end(span)  # type: ignore[arg-type]  # it only asks for the context

    def close(self) -> None:
        """Exports the queued spans; waits a few seconds at most."""
        for processor in self._processors:
            processor.shutdown()


NO_TRACER: Final = Tracer(())


def open_tracer(
    config: TelemetryConfig, service: str, instance_id: str, registry: Registry | None = None
) -> Tracer:
    """Returns the tracer of a process; one that records nothing if `config` names no exporter.

    Spans wait in a bounded queue, and a thread of its own exports them: a collector that is down
    costs spans, never requests. Raises ConfigError if the folder of traces can't be written.
    """
    if not (config.otlp_endpoint or config.trace_folder):
        return NO_TRACER
    exporters: list[OtlpSpans | FileSpans] = []
    of = resource(service, instance_id)
    if config.otlp_endpoint:
        exporters.append(OtlpSpans(config.otlp_endpoint, of))
    if config.trace_folder:
        exporters.append(FileSpans.open(config.trace_folder, instance_id, of))
    return Tracer(
        [
            BatchSpanProcessor(
                exporter,
                max_queue_size=_MOST_QUEUED_SPANS,
                schedule_delay_millis=_EXPORT_EVERY_MS,
            )
            for exporter in exporters
        ],
        ratio=config.trace_ratio,
        tail_spans=config.trace_tail_spans,
        registry=registry,
    )
