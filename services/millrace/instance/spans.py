"""Records what an instance does for a request: bars of its waterfall, and spans of its trace."""

from __future__ import annotations

from millrace.core.request_spec import RequestSpec
from millrace.core.span import Span
from millrace.telemetry.tracing.context import log_fields
from millrace.telemetry.tracing.stopwatch import Stopwatch
from millrace.telemetry.tracing.tracer import NO_TRACER, Tracer


def span(
    name: str,
    instance_id: str,
    start_s: float,
    end_s: float,
    **attributes: object,
) -> Span:
    """Builds a bar of the waterfall; times are in seconds since the request's arrival."""
    return Span(
        name=name,
        instance_id=instance_id,
        start_s=start_s,
        end_s=max(start_s, end_s),
        attributes={k: str(v) for k, v in attributes.items()},
    )


class RequestTrace:
    """The work of one instance for one request, from `began_s` on. On any thread.

    `spans` are the bars of the answer's waterfall. The same spans, with those that only the trace
    shows, go to the tracer below one span of the instance, which `end` records. All times are in
    seconds since the request's arrival.
    """

    __slots__ = ("_instance_id", "_named", "_scope", "began_s", "clock", "spans")

    def __init__(
        self, spec: RequestSpec, instance_id: str, tracer: Tracer = NO_TRACER, attempt: int = 1
    ) -> None:
        self.clock = Stopwatch(spec.arrival_unix_s)
        self.began_s = self.clock.now_s()
        self.spans: list[Span] = []
        self._instance_id = instance_id
        self._scope = tracer.scope(spec.traceparent, spec.arrival_unix_s)
        self._named: dict[str, str | int] = {
            "millrace.request_id": spec.request_id,
            "millrace.attempt": attempt,
        }

    @property
    def records(self) -> bool:
        """Whether the tracer takes the spans."""
        return self._scope.records

    @property
    def exemplar(self) -> dict[str, str] | None:
        """Returns the labels of a metric's exemplar; None if the trace is not sampled."""
        return self._scope.exemplar

    def take(self) -> tuple[Span, ...]:
        """Returns the bars since the last call: those that an event carries to the proxy."""
        taken, self.spans = tuple(self.spans), []
        return taken

    def queued(self) -> None:
        """Adds the bar of the time at the scheduler, which traces it itself."""
        self.spans.append(span("queued", "scheduler", 0.0, self.began_s))

    def add(
        self, name: str, start_s: float, end_s: float, *, bar: str = "", **attributes: str | float
    ) -> None:
        """Adds a bar of the waterfall and its span; `bar` names the bar, if not `name`."""
        self.spans.append(span(bar or name, self._instance_id, start_s, end_s, **attributes))
        self.trace(name, start_s, end_s, **attributes)

    def trace(self, name: str, start_s: float, end_s: float, **attributes: str | float) -> None:
        """Adds a span that the waterfall does not show."""
        if self._scope.records:
            named = {f"millrace.{key}": value for key, value in attributes.items()}
            self._scope.child(name, start_s, end_s, named)

    def trace_steps(
        self, start_s: float, end_s: float, moments: list[tuple[str, float, dict[str, int]]]
    ) -> None:
        """Adds the span of an answer's decode steps, with a moment for every few of them."""
        self._scope.child("decode_steps", start_s, end_s, moments=moments)

    def end(self, name: str, error: str = "", **attributes: str | float) -> None:
        """Records the instance's span, up to now; `error` is empty unless the work failed."""
        if self._scope.records:
            named = {f"millrace.{key}": value for key, value in attributes.items()}
            self._scope.end(
                name, self.began_s, self.clock.now_s(), {**self._named, **named}, error=error
            )


def of_request(spec: RequestSpec) -> dict[str, str]:
    """Returns the fields of a log record that is about a request, for `extra`."""
    return log_fields(spec.request_id, spec.traceparent)
