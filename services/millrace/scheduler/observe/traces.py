"""Traces what the scheduler does for each request: its time in the queue, and every plan."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from millrace.core.request import RequestState
from millrace.core.scheduler.dispatch.dispatcher import Planned
from millrace.core.scheduler.effects import Record, RunPrefill
from millrace.telemetry.tracing.context import log_fields
from millrace.telemetry.tracing.finished import Attributes
from millrace.telemetry.tracing.stopwatch import Stopwatch
from millrace.telemetry.tracing.tracer import Scope, Tracer


@dataclass(slots=True)
class _Traced:
    """A live request. Times are in seconds since its arrival at the proxy."""

    scope: Scope
    traceparent: str
    clock: Stopwatch
    submitted_s: float
    queued_s: float  # since when it waits to be sent; it may wait again after a failed attempt
    sent_attempt: int = 0
    planned: Planned | None = None


class SchedulerTraces:
    """The spans of all live requests. Used from the event loop only."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._live: dict[str, _Traced] = {}
        self._step_s = 0.0  # of time.monotonic

    @property
    def is_on(self) -> bool:
        return self._tracer.is_on

    def submitted(self, request_id: str, traceparent: str, arrival_unix_s: float) -> None:
        """Begins a request's trace here; does nothing if the request is known or not traced."""
        if not self._tracer.is_on or request_id in self._live:
            return
        scope = self._tracer.scope(traceparent, arrival_unix_s)
        if scope.records:
            clock = Stopwatch(arrival_unix_s)
            now_s = clock.now_s()
            self._live[request_id] = _Traced(scope, traceparent, clock, now_s, now_s)

    def began_step(self) -> None:
        """Notes that the machine takes an event."""
        if self._live:
            self._step_s = time.monotonic()

    def planned(self, planned: Planned) -> None:
        """Notes a plan, while the machine decides."""
        if (traced := self._live.get(planned.request_id)) is not None:
            traced.planned = planned

    def sent(self, effect: RunPrefill) -> None:
        """Records the queue time and the plan of an attempt, when its first command is sent."""
        traced = self._live.get(effect.request_id)
        if traced is None or traced.sent_attempt == effect.attempt:
            return
        traced.sent_attempt = effect.attempt
        began_s = traced.clock.at_monotonic_s(self._step_s)
        now_s = traced.clock.now_s()
        named: dict[str, str | int] = {
            "millrace.attempt": effect.attempt,
            "millrace.decode": effect.decode_id,
        }
        traced.scope.child("queued", traced.queued_s, max(began_s, traced.queued_s), named)
        planned, traced.planned = traced.planned, None
        if planned is None:  # it was placed at an instance that prefills and decodes
            traced.scope.child("plan", began_s, now_s, named)
        else:
            traced.scope.child("plan", began_s, now_s, lambda: {**named, **_of_plan(planned)})

    def recorded(self, record: Record) -> None:
        """Follows a request's state: queued again, or at its end."""
        traced = self._live.get(record.request_id)
        if traced is None:
            return
        if record.state is RequestState.QUEUED and traced.sent_attempt:
            traced.queued_s = traced.clock.at_monotonic_s(self._step_s)
        elif record.state.is_final:
            self.ended(record.request_id)

    def ended(self, request_id: str, error: str = "") -> None:
        """Records the scheduler's span of a request; `error` is empty unless it failed."""
        if (traced := self._live.pop(request_id, None)) is not None:
            now_s = traced.clock.now_s()
            named = {"millrace.request_id": request_id}
            traced.scope.end("schedule", traced.submitted_s, now_s, named, error=error)

    def keep(self, trace_ids: Sequence[str]) -> None:
        self._tracer.keep([int(trace_id, 16) for trace_id in trace_ids])

    def about(self, request_id: str) -> dict[str, str]:
        """Returns the fields of a log record that is about a request."""
        traced = self._live.get(request_id)
        return log_fields(request_id, "" if traced is None else traced.traceparent)


def _of_plan(planned: Planned) -> Attributes:
    """Describes a plan: its chunks and groups, and the TTFT that it and its alternatives predict,
    in seconds from the plan.
    """
    named: dict[str, str | float] = {
        "millrace.predicted_ttft_s": planned.ttft_s,
        "millrace.chunks": "; ".join(
            f"{chunk.num_tokens} on {', '.join(chunk.instance_ids)}" for chunk in planned.chunks
        ),
    }
    for instance_ids, ttft_s in planned.alternatives():
        name = f"millrace.alternative.sp{len(instance_ids)}"
        named[f"{name}.ttft_s"] = ttft_s
        named[f"{name}.instances"] = ", ".join(instance_ids)
    return named
