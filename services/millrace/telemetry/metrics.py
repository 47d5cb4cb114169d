"""A process's metrics, and a small HTTP endpoint for services without HTTP of their own.

Names are `millrace_<area>_<what>_<unit>`; a counter's ends in `_total` after its unit.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    ProcessCollector,
)
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from millrace.core.errors import MillraceError

MAX_REQUEST_BYTES = 16 << 10
MAX_CONNECTIONS = 64
REQUEST_TIMEOUT_S = 5.0

#: The last part of a name (before a counter's `_total`): base units and counted things.
UNITS = frozenset(
    {
        *("seconds", "bytes", "tokens", "ratio", "info"),
        *("requests", "chunks", "steps", "sequences", "pages", "tasks", "messages"),
        *("instances", "connections", "transfers", "errors", "retries", "changes"),
        *("rounds", "commands", "shards"),
    }
)
_NAME = re.compile(r"millrace(_[a-z][a-z0-9]*){2,}_(?P<unit>[a-z]+)")

#: In seconds, from a decode step on the fastest GPU to a prefill of a million tokens.
SECONDS_BUCKETS = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0),
)

#: By the label's value, then by name.
Sample = Callable[[], Mapping[str, Mapping[str, float | None]]]


class Registry:
    """All metrics of one process; the process's own (CPU, memory, files) come with it."""

    def __init__(self) -> None:
        self._collectors = CollectorRegistry()
        ProcessCollector(registry=self._collectors)

    def counter(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Counter:
        """Makes a counter; `name` ends in `_total`. Raises ValueError for a malformed or used
        name.
        """
        if not name.endswith("_total"):
            raise ValueError(f"counter {name!r} must end in _total")
        _check(name.removesuffix("_total"))
        return Counter(name, documentation, labels, registry=self._collectors)

    def gauge(self, name: str, documentation: str, labels: Sequence[str] = ()) -> Gauge:
        """Makes a gauge. Raises ValueError for a malformed or used name."""
        _check(name)
        return Gauge(name, documentation, labels, registry=self._collectors)

    def gauge_function(self, name: str, documentation: str, value: Callable[[], float]) -> None:
        """Makes a gauge that calls `value` at every read. Raises ValueError as `gauge` does."""
        self.gauge(name, documentation).set_function(value)

    def gauges_by(self, label: str, documentation: Mapping[str, str], sample: Sample) -> None:
        """Makes gauges with one label, by name: each scrape calls `sample` once for all of them.

        Missing and None values are not exposed. Raises ValueError as `gauge` does.
        """
        for name in documentation:
            _check(name)
        self._collectors.register(_Sampled(label, documentation, sample))

    def histogram(
        self,
        name: str,
        documentation: str,
        labels: Sequence[str] = (),
        *,
        buckets: Sequence[float] = SECONDS_BUCKETS,
    ) -> Histogram:
        """Makes a histogram; `buckets` are upper bounds in the name's unit. Raises ValueError as
        `gauge` does.
        """
        _check(name)
        return Histogram(name, documentation, labels, buckets=buckets, registry=self._collectors)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Returns the exposition and its content type, in the format that an Accept header
        prefers.
        """
        encode, content_type = choose_encoder(accept)
        return encode(self._collectors), content_type


class _Sampled(Collector):
    def __init__(self, label: str, documentation: Mapping[str, str], sample: Sample) -> None:
        self._label = label
        self._documentation = documentation
        self._sample = sample

    def describe(self) -> Iterable[GaugeMetricFamily]:
        """Returns the names, without a call of `sample`."""
        return self._families().values()

    def collect(self) -> Iterable[GaugeMetricFamily]:
        families = self._families()
        for value, gauges in self._sample().items():
            for name, measured in gauges.items():
                if measured is not None:
                    families[name].add_metric([value], measured)
        return families.values()

    def _families(self) -> dict[str, GaugeMetricFamily]:
        return {
            name: GaugeMetricFamily(name, documentation, labels=[self._label])
            for name, documentation in self._documentation.items()
        }


def _check(name: str) -> None:
    match = _NAME.fullmatch(name)
    if match is None or match["unit"] not in UNITS:
        raise ValueError(
            f"metric {name!r} must read millrace_<area>_<what>_<unit>, with a unit of "
            f"{', '.join(sorted(UNITS))}"
        )


#: Status, content type and body.
_Answer = tuple[HTTPStatus, str, bytes]

_TEXT = "text/plain; charset=utf-8"


class MetricsServer:
    """Answers GET and HEAD, one request per connection. Made by `serve_metrics`."""

    def __init__(self, registry: Registry, ready: Callable[[], bool]) -> None:
        self._registry = registry
        self._ready = ready
        self._server: asyncio.Server | None = None
        self.port = 0  # the real port once it listens
        self._connections: set[asyncio.Task[None]] = set()

    async def listen(self, host: str, port: int) -> None:
        """Listens. Raises MillraceError naming host and port when the address can't be used."""
        try:
            self._server = await asyncio.start_server(
                self._accept, host, port, limit=MAX_REQUEST_BYTES
            )
        except OSError as error:
            raise MillraceError(f"can't listen on {host}:{port} for metrics: {error}") from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        """Stops listening and drops open connections."""
        if self._server is not None:
            self._server.close()
            for task in tuple(self._connections):
                task.cancel()
            await asyncio.gather(*self._connections, return_exceptions=True)
            await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._connections) >= MAX_CONNECTIONS:
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(TimeoutError, OSError, asyncio.IncompleteReadError):
            try:
                async with asyncio.timeout(REQUEST_TIMEOUT_S):
                    await self._exchange(reader, writer)
            finally:
                writer.close()
            await writer.wait_closed()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        except asyncio.LimitOverrunError:
            head, answer = "", _error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
        else:
            answer = self._answer(head)
        status, content_type, body = answer
        writer.write(
            f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\n"
            f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode("latin-1")
        )
        if not head.startswith("HEAD "):
            writer.write(body)
        await writer.drain()

    def _answer(self, head: str) -> _Answer:
        request_line, *headers = head.split("\r\n")
        words = request_line.split(" ")
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return _error(HTTPStatus.BAD_REQUEST)
        method, target, _ = words
        if method not in ("GET", "HEAD"):
            return _error(HTTPStatus.METHOD_NOT_ALLOWED)
        match target.partition("?")[0]:
            case "/metrics":
                accept = [h[7:].strip() for h in headers if h.lower().startswith("accept:")]
                body, content_type = self._registry.render(", ".join(accept))
                return HTTPStatus.OK, content_type, body
            case "/health":
                return HTTPStatus.OK, _TEXT, b"ok\n"
            case "/ready":
                if self._ready():
                    return HTTPStatus.OK, _TEXT, b"ready\n"
                return HTTPStatus.SERVICE_UNAVAILABLE, _TEXT, b"not ready\n"
        return _error(HTTPStatus.NOT_FOUND)


def _error(status: HTTPStatus) -> _Answer:
    return status, _TEXT, f"{status.phrase}\n".encode()


async def serve_metrics(
    port: int, ready: Callable[[], bool], *, registry: Registry, host: str = "127.0.0.1"
) -> MetricsServer:
    """Serves /metrics, /ready (503 while `ready()` is false) and /health; port 0: any free port.

    Raises MillraceError when it can't listen. Close the returned server.
    """
    server = MetricsServer(registry, ready)
    await server.listen(host, port)
    return server
