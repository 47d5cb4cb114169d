"""A connection of the HTTP server: uvicorn's, for clients that uvicorn fails or waits for too long.

uvicorn reads a head of any size, waits for ever for the end of a head, and loses the body of a
request that offers another protocol (`Upgrade: h2c`), as Java's HTTP client does by default. It
takes as many connections as come, until no file is left for those to Redis and other services.
"""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import ClassVar

from httptools import HttpParserError, HttpParserUpgrade
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from millrace.proxy.errors import ApiError, overloaded

#: Of a request's first line and its headers together.
MOST_HEAD_BYTES = 64 << 10
#: The time for the head of a request, from the connection or from its first byte.
HEAD_S = 75.0
#: How long the rest of a refused head is read, so that its sender gets the answer.
_LINGER_S = 1.0

#: Headers of an offer of another protocol. It is not taken, which HTTP allows.
_OFFER = frozenset({b"upgrade", b"http2-settings"})


class Connection(HttpToolsProtocol):
    """uvicorn's protocol with limits on connections and heads, and without other protocols."""

    most_connections: ClassVar[int]
    most_refused: ClassVar[int]
    _in_head = False
    _head_bytes = 0
    _refused = False
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_timer()
        above = len(self.connections) - self.most_connections
        if above > self.most_refused:
            transport.abort()
        elif above > 0:
            self._refuse(overloaded(f"{self.most_connections} clients are connected already."))

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unset_keepalive_if_required()
        try:
            self._feed(data)
        except HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
            return
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MOST_HEAD_BYTES:
                message = f"The request's headers have more than {MOST_HEAD_BYTES} bytes."
                self._refuse(ApiError(431, message, code="headers_too_large"))
            elif self._timer is None:
                self._set_timer()

    def _feed(self, data: bytes) -> None:
        """Parses data. Raises HttpParserError."""
        try:
            self.parser.feed_data(data)
        except HttpParserUpgrade as offer:  # the parser stops after the head, before the body
            if self.parser.get_method() == b"CONNECT":
                raise HttpParserError("no proxy for others") from None
            head = self._head_without_offer()
            self.parser = type(self.parser)(self)
            self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn
            self._feed(head + data[offer.args[0] :])

    def _head_without_offer(self) -> bytes:
        line = b"%s %s HTTP/%s" % (
            self.parser.get_method(),
            self.url,
            self.parser.get_http_version().encode(),
        )
        kept = [line]
        for name, value in self.headers:
            if name == b"connection":
                tokens = (one.strip() for one in value.split(b","))
                value = b", ".join(one for one in tokens if one.lower() not in _OFFER)
            if name not in _OFFER and value:
                kept.append(name + b": " + value)
        return b"\r\n".join(kept) + b"\r\n\r\n"

    # -- the parser's callbacks

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        self._in_head, self._head_bytes = False, 0
        self._cancel_timer()
        if not self.parser.should_upgrade():  # else `_feed` parses the head once more
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self.parser.should_upgrade():
            super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._timer is not None:
            self._set_timer()  # reading may have paused until now

    # -- heads that never end

    def _set_timer(self) -> None:
        self._cancel_timer()
        self._timer = self.loop.call_later(HEAD_S, self._give_up)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        self._timer = None
        if self.cycle is not None and not self.cycle.response_complete:
            self._set_timer()  # the head of the next request, behind a running one
        elif self._in_head:
            message = f"The request's headers were not complete within {HEAD_S:g} s."
            self._refuse(ApiError(408, message, code="timeout"))
        else:
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        self._refused = True
        self._cancel_timer()
        body = error.body()
        self.transport.write(
            b"HTTP/1.1 %d %s\r\n" % (error.status, HTTPStatus(error.status).phrase.encode())
            + b"".join([b"%s: %s\r\n" % header for header in error.headers()])
            + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
            + body
        )
        self.transport.write_eof()
        self.loop.call_later(_LINGER_S, self.transport.close)


def at_most(connections: int, refused: int) -> type[Connection]:
    """Returns the class of connections of one server, which has so many at a time. It tells further
    clients that it is full, `refused` of them at a time.
    """
    limits = {"most_connections": connections, "most_refused": refused}
    return type("Connection", (Connection,), limits)
