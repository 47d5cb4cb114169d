"""The waterfalls of requests: in answers, and of the last requests that ended at this proxy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import orjson

from millrace.core.span import Span
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.tracing.timeline import Adopted, Timeline, own_spans
from millrace.telemetry.trace import Waterfall
from millrace.telemetry.tracing.context import trace_id_of
from millrace.wire.codec.token_events import decode_span

Json = dict[str, Any]

#: What Python takes for an entry beside its id and its text.
_ENTRY_BYTES: Final = 300

Share = Callable[[str, bytes], None]


def waterfall(times: Timeline) -> Waterfall:
    """Returns the bars of one request, in seconds since the arrival of the HTTP request."""
    found = Waterfall(request_id=times.request_id, arrival_unix_s=times.arrival_unix_s)
    if times.adopted is not None:
        found.add(_before(times.proxy_id, times.adopted))
    found.add(
        Span(
            name=own.name,
            instance_id=times.proxy_id,
            start_s=own.start_s,
            end_s=own.end_s,
            attributes={name: f"{value:.6g}" for name, value in own.attributes.items()},
        )
        for own in own_spans(times)
    )
    found.add(_after(times.submitted_s, decode_span(bar)) for bar in times.bars)
    return found


def _before(proxy_id: str, adopted: Adopted) -> Iterator[Span]:
    """Yields the bars that the former replica wrote to the store, and the mark of the adoption: it
    begins with the gap in which nothing is known.
    """
    gap_s, told = 0.0, {"tokens": str(adopted.tokens), "former": "unknown"}
    if adopted.former is not None:
        known = waterfall(adopted.former)
        yield from known.spans
        gap_s, told["former"] = known.end_s, adopted.former.proxy_id
    yield Span(
        name="adopted",
        instance_id=proxy_id,
        start_s=min(gap_s, adopted.at_s),
        end_s=adopted.at_s,
        attributes=told,
    )


def _after(submitted_s: float, bar: Span) -> Span:
    """Starts "queued" at the submission: instances count it from the arrival."""
    if bar.name != "queued":
        return bar
    return replace(bar, start_s=min(max(submitted_s, bar.start_s), bar.end_s))


def explain(requests: Iterable[ProxyRequest]) -> Json:
    """Returns the `millrace` object of a response; prompts after the first go to `more`."""
    return _document(map(Timeline.of, requests))


def _document(timelines: Iterable[Timeline]) -> Json:
    documents = []
    for times in timelines:
        document = waterfall(times).to_dict()
        document["predicted_ttft_ms"] = round(times.predicted_s * 1e3, 3)
        if (ttft_s := times.ttft_s) is not None:
            document["ttft_ms"] = round(ttft_s * 1e3, 3)
        if trace_id := trace_id_of(times.traceparent):
            document["trace_id"] = trace_id
        documents.append(document)
    first, *more = documents
    return {**first, "more": more} if more else first


class RecentWaterfalls:
    """Keeps what the waterfalls of the last responses need, in at most `most_bytes` bytes.

    The oldest makes room. Used from the event loop only.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        #: Shares a waterfall with other replicas: its response's id, and what `document_of` reads.
        self.share: Share | None = None
        self._kept: OrderedDict[str, bytes] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        """The responses that it keeps."""
        return len(self._kept)

    def add(self, requests: Sequence[ProxyRequest], error: str) -> None:
        """Keeps a response that ended; `error` is empty unless it failed."""
        if not self._most_bytes:
            return
        first = requests[0]
        packed = [Timeline.of(one).packed() for one in requests]
        text = orjson.dumps((first.spec.tenant, error, packed))
        name = first.request_id
        self._forget(name)
        self._kept[name] = text
        self._bytes += _size(name, text)
        while self._bytes > self._most_bytes:
            self._forget(next(iter(self._kept)))
        if self.share is not None:
            self.share(name, text)

    def _forget(self, name: str) -> None:
        text = self._kept.pop(name, None)
        if text is not None:
            self._bytes -= _size(name, text)

    def find(self, response_id: str, tenant: str | None) -> Json | None:
        """Returns the document of a response of the tenant (None: of any); None: not kept."""
        text = self._kept.get(response_id) or self._kept.get(f"{response_id}-0")
        return None if text is None else document_of(text, tenant)


def document_of(text: bytes, tenant: str | None) -> Json | None:
    """Reads a kept response of the tenant (None: of any); None: it is another tenant's."""
    owner, error, packed = orjson.loads(text)
    if tenant not in (None, owner):
        return None
    document = _document(map(Timeline.unpacked, packed))
    return {**document, "error": error} if error else document


def _size(name: str, text: bytes) -> int:
    return _ENTRY_BYTES + len(name) + len(text)


#: Asks the other processes of this proxy, or the store that all replicas share: for the responses
#: that may be meant, and their tenant.
Ask = Callable[[Sequence[str], str | None], Awaitable[Json | None]]
#: Returns the open requests of a response, at any model.
OpenRequests = Callable[[str], Sequence[ProxyRequest]]


class Waterfalls:
    """Finds the waterfall of a response, which may be open or may have ended lately."""

    def __init__(self, recent: RecentWaterfalls, open_requests: OpenRequests) -> None:
        self._recent = recent
        self._open_requests = open_requests
        #: None: the proxy is one process.
        self.ask_siblings: Ask | None = None
        #: None: this proxy shares nothing.
        self.ask_store: Ask | None = None

    async def find(self, response_ids: Sequence[str], tenant: str | None) -> Json | None:
        """Returns the document of the first response that any replica knows.

        `tenant`: only of this tenant; None: of any. Raises ApiError as `SharedWaterfalls.find`.
        """
        found = self.here(response_ids, tenant)
        for ask in (self.ask_siblings, self.ask_store):
            if found is None and ask is not None:
                found = await ask(response_ids, tenant)
        return found

    def here(self, response_ids: Iterable[str], tenant: str | None) -> Json | None:
        """Works as `find`, in this process."""
        for response_id in response_ids:
            own = self._open_requests(response_id)
            if own and tenant in (None, own[0].spec.tenant):
                return explain(own)
            if (found := self._recent.find(response_id, tenant)) is not None:
                return found
        return None
