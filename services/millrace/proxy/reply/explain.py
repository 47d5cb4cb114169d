"""Builds a response's TTFT waterfall from the proxy's own bars and those of other services."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from millrace.core.span import Span
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.telemetry.trace import Waterfall
from millrace.telemetry.tracing.context import trace_id_of


def waterfall(request: ProxyRequest, arrival_unix_s: float, proxy_id: str) -> Waterfall:
    """Returns the bars of one request, in seconds since the arrival of the HTTP request."""
    arrived = request.arrived_at
    read_s, started_s = request.read_at - arrived, request.started_at - arrived
    submitted_s = request.submitted_at - arrived
    found = Waterfall(request_id=request.request_id, arrival_unix_s=arrival_unix_s)
    found.add([Span(name="tokenise", instance_id=proxy_id, start_s=0.0, end_s=read_s)])
    found.add([Span(name="record", instance_id=proxy_id, start_s=read_s, end_s=started_s)])
    if request.placed_at is not None:
        placed_s = request.placed_at - arrived
        found.add([Span(name="planned", instance_id=proxy_id, start_s=submitted_s, end_s=placed_s)])
    found.add(_after(submitted_s, span) for span in request.spans)
    return found


def _after(submitted_s: float, span: Span) -> Span:
    """Starts "queued" at the submission: instances count it from the arrival."""
    if span.name != "queued":
        return span
    return replace(span, start_s=min(submitted_s, span.end_s))


def explain(
    requests: Sequence[ProxyRequest], arrival_unix_s: float, proxy_id: str
) -> dict[str, Any]:
    """Returns the `millrace` object of a response; prompts after the first go to `more`."""
    documents = []
    for request in requests:
        document = waterfall(request, arrival_unix_s, proxy_id).to_dict()
        document["predicted_ttft_ms"] = round(request.predicted_ttft_s * 1e3, 3)
        if request.first_token_at is not None:
            ttft_s = request.first_token_at - request.arrived_at
            document["ttft_ms"] = round(ttft_s * 1e3, 3)
        if trace_id := trace_id_of(request.spec.traceparent):
            document["trace_id"] = trace_id
        documents.append(document)
    first, *more = documents
    return {**first, "more": more} if more else first
