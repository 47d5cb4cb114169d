"""A light HTTP/1.1 client for server-sent events, far cheaper than the measured server.

Responses are parsed by httptools as bytes arrive. Every event gets the time at which its last byte
was read. Connections are kept and used again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools
import orjson

from millrace.core.errors import ConfigError


@dataclass(slots=True)
class Response:
    """A response; times are of `time.perf_counter()`.

    `events` holds (time, data) of each server-sent event of a stream; for other bodies, `body`
    holds the bytes.
    """

    sent_s: float
    status: int = 0
    events: list[tuple[float, bytes]] = field(default_factory=list)
    body: bytearray = field(default_factory=bytearray)
    ended_s: float = 0.0

    def json(self) -> object:
        """Parses the body. Raises orjson.JSONDecodeError."""
        return orjson.loads(self.body)


class _Stale(ConnectionResetError):
    """A kept connection was closed before any byte of an answer: the request may be sent again."""


class _Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._response: Response | None = None
        self._done: asyncio.Future[None] | None = None
        self._parser: httptools.HttpResponseParser | None = None
        self._is_stream = False
        self._is_delimited = False  # else the body ends with the connection
        self._exchanges = 0
        self._line = bytearray()
        self._data: list[bytes] = []
        self._now_s = 0.0
        self.reusable = False
        self.closed = False

    # -- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self._now_s = time.perf_counter()
        if self._parser is None:  # bytes between responses: don't use this server again
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(ConnectionError(f"malformed HTTP response: {error}"))

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        heard = self._response is not None and self._response.status > 0
        if exc is None and heard and not self._is_delimited:
            self._finish(None)
        elif self._exchanges > 1 and not heard:
            self._finish(_Stale("the server closed an idle connection"))
        else:
            self._finish(exc or ConnectionResetError("the server closed the connection"))

    # -- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._is_stream = value.lower().startswith(b"text/event-stream")
        elif name in (b"content-length", b"transfer-encoding"):
            self._is_delimited = True

    def on_headers_complete(self) -> None:
        assert self._response is not None and self._parser is not None
        self._response.status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        assert self._response is not None
        if not self._is_stream:
            self._response.body += body
            return
        if self._line:
            body = bytes(self._line) + body
            self._line.clear()
        *lines, rest = body.split(b"\n")
        self._line += rest
        for line in lines:
            self._take_line(line.removesuffix(b"\r"))

    def on_message_complete(self) -> None:
        assert self._parser is not None
        self.reusable = self._parser.should_keep_alive()
        self._finish(None)

    # -- own

    async def exchange(self, request: bytes) -> Response:
        """Sends a request and reads the whole response. Raises ConnectionError."""
        if self._transport is None or self.closed:
            raise _Stale("the connection is closed")
        self._exchanges += 1
        self._parser = httptools.HttpResponseParser(self)
        self._done = asyncio.get_running_loop().create_future()
        self._is_stream = self._is_delimited = self.reusable = False
        response = self._response = Response(sent_s=time.perf_counter())
        self._transport.write(request)
        try:
            await self._done
        finally:
            self._parser = self._done = self._response = None
            self._line.clear()
            self._data.clear()
        return response

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def _take_line(self, line: bytes) -> None:
        assert self._response is not None
        if line.startswith(b"data:"):
            self._data.append(line[5:].removeprefix(b" "))
        elif not line and self._data:
            self._response.events.append((self._now_s, b"\n".join(self._data)))
            self._data.clear()

    def _finish(self, error: Exception | None) -> None:
        if self._done is None or self._done.done():
            return
        assert self._response is not None
        self._response.ended_s = self._now_s
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)


class SseClient:
    """Talks to one base URL. Opens one connection per concurrent request."""

    def __init__(self, url: str, headers: Mapping[str, str] | None = None) -> None:
        """Raises ConfigError for a URL that is not http:// or https:// with a host."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"--url {url!r}: write it as http://HOST[:PORT] or https://...")
        self._host = parts.hostname
        self._tls = parts.scheme == "https"
        self._port = parts.port or (443 if self._tls else 80)
        self._path = parts.path.rstrip("/")
        common = {"host": parts.netloc.rpartition("@")[2], **(headers or {})}
        self._headers = "".join(f"{name}: {value}\r\n" for name, value in common.items())
        self._idle: list[_Connection] = []

    async def get(self, path: str) -> Response:
        """Sends a GET. Raises OSError when the server can't be reached or closes the connection."""
        head = f"GET {self._path}{path} HTTP/1.1\r\n{self._headers}\r\n"
        return await self._send(head.encode())

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None
    ) -> Response:
        """Posts JSON. Raises OSError as `get` does. A cancelled call closes its connection."""
        extra = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        head = (
            f"POST {self._path}{path} HTTP/1.1\r\n{self._headers}{extra}"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        return await self._send(head.encode() + body)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()

    async def _send(self, request: bytes) -> Response:
        while self._idle:
            try:
                return await self._exchange(self._idle.pop(), request)
            except _Stale:
                continue
        _, connection = await asyncio.get_running_loop().create_connection(
            _Connection, self._host, self._port, ssl=self._tls or None
        )
        return await self._exchange(connection, request)

    async def _exchange(self, connection: _Connection, request: bytes) -> Response:
        try:
            response = await connection.exchange(request)
        except BaseException:
            connection.close()
            raise
        if connection.reusable and not connection.closed:
            self._idle.append(connection)
        else:
            connection.close()
        return response
