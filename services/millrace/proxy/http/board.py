"""The board: the page at /board, and the events that it shows.

The page has no data and is open to all. The events are an administrator's, as the other routes
below /admin are.
"""

from __future__ import annotations

import asyncio
import gzip
import uuid
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from functools import cache

import orjson

from millrace.concurrency import cancel
from millrace.core.config import ProxyConfig
from millrace.proxy.board.page import content_security_policy, page
from millrace.proxy.errors import ApiError
from millrace.proxy.http.admin import Guard
from millrace.proxy.http.asgi import Receive, Scope, Send, header
from millrace.proxy.http.client import Client, send_parts
from millrace.proxy.http.query import query_of
from millrace.wire.clients.scheduler_client import SchedulerUnavailable, watch_board

PAGE_PATH = "/board"
EVENTS_PATH = "/admin/board/events"

#: How often a silent stream looks whether its client is still there.
_LOOK_S = 0.5

#: Lines of the board as they come, from the scheduler at an address.
Watch = Callable[[str], AsyncGenerator[bytes, None]]


async def show_page(scope: Scope, receive: Receive, send: Send) -> int:
    """Sends the page; returns the status."""
    del receive  # a GET
    packed = "gzip" in (header(scope, b"accept-encoding") or "")
    body = _packed() if packed else page().encode()
    headers = [
        (b"content-type", b"text/html; charset=utf-8"),
        (b"content-length", b"%d" % len(body)),
        (b"content-security-policy", content_security_policy().encode()),
        (b"cache-control", b"no-cache"),
        (b"vary", b"accept-encoding"),
        (b"x-content-type-options", b"nosniff"),
        (b"referrer-policy", b"no-referrer"),
    ]
    if packed:
        headers.append((b"content-encoding", b"gzip"))
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
    return 200


@cache
def _packed() -> bytes:
    return gzip.compress(page().encode(), mtime=0)


class BoardEvents:
    """Answers GET of `EVENTS_PATH`: server-sent events, each with one or more lines of the board.

    The stream ends with an event "error" when the scheduler is gone or this client reads too
    slowly, and without an event when the proxy stops.
    """

    def __init__(
        self,
        config: ProxyConfig,
        scheduler_of: Callable[[str | None], str],
        is_stopping: Callable[[], bool],
        watch: Watch = watch_board,
    ) -> None:
        """`scheduler_of` returns the address by the model's name. It raises ApiError (404)."""
        self._guard = Guard(config)
        self._keepalive_s = config.keepalive_s
        self._scheduler_of = scheduler_of
        self._is_stopping = is_stopping
        self._watch = watch

    async def answer(self, scope: Scope, receive: Receive, send: Send) -> int:
        """Returns the status that was sent. Raises ApiError before anything was sent."""
        self._guard.check(scope)
        address = self._scheduler_of(query_of(scope).get("model"))
        async with aclosing(self._watch(address)) as lines:
            try:
                first = await anext(lines, b"")
            except SchedulerUnavailable as error:
                raise ApiError(503, str(error), code="unavailable", retry_after_s=1.0) from error
            client = Client(receive, send, f"board_{uuid.uuid4().hex}")
            return await send_parts(client, self._parts(first, lines), self._keepalive_s)

    async def _parts(
        self, first: bytes, lines: AsyncGenerator[bytes, None]
    ) -> AsyncGenerator[bytes, None]:
        """Yields events, and empty bytes whenever there is none."""
        yield _event(first)
        following: asyncio.Future[bytes] | None = None
        try:
            while not self._is_stopping():
                following = following or asyncio.ensure_future(anext(lines, b""))
                done, _ = await asyncio.wait([following], timeout=_LOOK_S)
                if not done:
                    yield b""
                    continue
                if not (found := following.result()):
                    return  # the scheduler drains
                following = None
                yield _event(found)
        except SchedulerUnavailable as error:
            yield b"event: error\ndata: " + orjson.dumps({"message": str(error)}) + b"\n\n"
        finally:
            if following is not None:
                await cancel(following)


def _event(lines: bytes) -> bytes:
    return b"".join(b"data: " + line + b"\n" for line in lines.splitlines()) + b"\n"
