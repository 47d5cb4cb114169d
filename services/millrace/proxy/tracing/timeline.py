"""The times of a request at the proxy: the one source of its waterfall and of its trace's spans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

from millrace.core.span import EncodedSpan
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.wire.codec.token_events import encode_spans


class Adopted(NamedTuple):
    """When another replica of the proxy adopted a request, in seconds since its arrival; the tokens
    that were known then; and the former replica's timeline, if it is known.
    """

    at_s: float
    tokens: int
    former: Timeline | None


class Timeline(NamedTuple):
    """When a request passed the steps at the proxy, and the bars that it has of other services.

    Times are in seconds since its arrival; None: it has not come so far, or never did. Those of an
    adopted request are of this replica: its first token is the first one after the adoption.
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
    bars: Sequence[EncodedSpan]
    adopted: Adopted | None = None

    @staticmethod
    def of(request: ProxyRequest) -> Timeline:
        """Returns the times so far. The bars may be the request's list, which may still grow."""
        spec, at, adoption = request.spec, request.arrived_at, request.adoption
        placed, first = request.placed_at, request.first_token_at
        adopted = None
        if adoption is not None:
            first = adoption.first_token_at
            former = None if adoption.former is None else Timeline.unpacked(adoption.former)
            adopted = Adopted(adoption.at - at, adoption.tokens, former)
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
            (*request.spans, *encode_spans(request.waits)) if request.waits else request.spans,
            adopted,
        )

    @property
    def ttft_s(self) -> float | None:
        """When the client got the first token; None: never, or unknown since its adoption."""
        if self.adopted is None:
            return self.first_token_s
        former = self.adopted.former
        if former is not None and former.ttft_s is not None:
            return former.ttft_s
        return None if self.adopted.tokens else self.first_token_s

    @property
    def predicted_s(self) -> float:
        """The prediction of `ttft_s` before the first token; 0 if it is unknown."""
        former = None if self.adopted is None else self.adopted.former
        return self.predicted_ttft_s or (0.0 if former is None else former.predicted_s)

    def packed(self) -> tuple[Any, ...]:
        """Returns what `unpacked` reads, of types that orjson writes: a request in about 1 us."""
        packed = (*self[:_BARS], [one.decode("latin-1") for one in self.bars])
        if self.adopted is None:
            return packed
        at_s, tokens, former = self.adopted
        return (*packed, at_s, tokens, None if former is None else former.packed())

    @staticmethod
    def unpacked(packed: Sequence[Any]) -> Timeline:
        times, bars, adoption = packed[:_BARS], packed[_BARS], packed[_BARS + 1 :]
        read = [one.encode("latin-1") for one in bars]
        adopted = None
        if adoption:
            at_s, tokens, former = adoption
            known = None if former is None else Timeline.unpacked(former)
            adopted = Adopted(at_s, tokens, known)
        return Timeline._make((*times, read, adopted))


_BARS: Final = Timeline._fields.index("bars")


class OwnSpan(NamedTuple):
    """What the proxy did for a request, in seconds since its arrival."""

    name: str
    start_s: float
    end_s: float
    attributes: Mapping[str, float]


def own_spans(times: Timeline) -> Iterator[OwnSpan]:
    """Yields the proxy's own spans, as the waterfall and the trace show them."""
    if times.adopted is None:
        yield OwnSpan("tokenise", 0.0, times.read_s, {"prompt_tokens": times.prompt_tokens})
        if times.started_s > times.read_s:
            yield OwnSpan("record", times.read_s, times.started_s, {})
    if times.placed_s is not None:
        predicted = {"predicted_ttft_s": times.predicted_ttft_s}
        yield OwnSpan("place", times.submitted_s, times.placed_s, predicted)
    if times.first_token_s is not None:
        earlier = 0 if times.adopted is None else times.adopted.tokens
        told: dict[str, float] = {"completion_tokens": times.completion_tokens - earlier}
        if not earlier:
            told["ttft_s"] = times.first_token_s
        yield OwnSpan("answer", times.first_token_s, times.last_token_s, told)
