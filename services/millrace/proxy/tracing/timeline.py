"""The times of a request at the proxy: the one source of its waterfall and of its trace's spans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from millrace.core.span import Span
from millrace.proxy.generation.proxy_request import ProxyRequest


class Timeline(NamedTuple):
    """When a request passed the steps at the proxy, and the bars that it has of other services.

    Times are in seconds since its arrival; None: it has not come so far, or never did.
    """

    request_id: str
    proxy_id: str
    arrival_unix_s: float
    traceparent: str
    prompt_tokens: int
    completion_tokens: int
    predicted_ttft_s: float
    read_s: float
    started_s: float
    submitted_s: float
    placed_s: float | None
    first_token_s: float | None
    last_token_s: float
    bars: Sequence[Span]

    @staticmethod
    def of(request: ProxyRequest) -> Timeline:
        """Returns the times so far. The bars are the request's own list, which may still grow."""
        spec, at = request.spec, request.arrived_at
        placed, first = request.placed_at, request.first_token_at
        return Timeline(
            request.request_id,
            spec.proxy.id,
            spec.arrival_unix_s,
            spec.traceparent,
            request.prompt_tokens,
            request.completion_tokens,
            request.predicted_ttft_s,
            request.read_at - at,
            request.started_at - at,
            request.submitted_at - at,
            None if placed is None else placed - at,
            None if first is None else first - at,
            request.last_token_at - at,
            request.spans,
        )

    def packed(self) -> tuple[Any, ...]:
        """Returns what `unpacked` reads, of types that orjson writes: a request in about 1 us."""
        bars = [
            (one.name, one.start_s, one.end_s, one.instance_id, dict(one.attributes))
            for one in self.bars
        ]
        return (*self[:-1], bars)

    @staticmethod
    def unpacked(packed: Sequence[Any]) -> Timeline:
        *times, bars = packed
        read = [
            Span(name=name, start_s=start_s, end_s=end_s, instance_id=instance, attributes=more)
            for name, start_s, end_s, instance, more in bars
        ]
        return Timeline._make((*times, read))


class OwnSpan(NamedTuple):
    """What the proxy did for a request, in seconds since its arrival."""

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, float]


def own_spans(times: Timeline) -> Iterator[OwnSpan]:
    """Yields the proxy's own spans, as the waterfall and the trace show them."""
    yield OwnSpan("tokenise", 0.0, times.read_s, {"prompt_tokens": times.prompt_tokens})
    if times.started_s > times.read_s:
        yield OwnSpan("record", times.read_s, times.started_s, {})
    if times.placed_s is not None:
        predicted = {"predicted_ttft_s": times.predicted_ttft_s}
        yield OwnSpan("place", times.submitted_s, times.placed_s, predicted)
    if times.first_token_s is not None:
        told = {"completion_tokens": times.completion_tokens, "ttft_s": times.first_token_s}
        yield OwnSpan("answer", times.first_token_s, times.last_token_s, told)
