"""The client of one request: where its answer goes, and whether it is still there."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

from millrace.proxy.http.asgi import Receive, Send

_EVENT_STREAM = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


@dataclass(frozen=True, slots=True)
class Client:
    """The client of one request. Answers carry the response's id in a header."""

    receive: Receive
    send: Send
    response_id: str

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(b"x-request-id", self.response_id.encode())]


async def start_stream(client: Client) -> None:
    """Sends the status and the headers of a stream of events."""
    headers = _EVENT_STREAM + client.headers
    await client.send({"type": "http.response.start", "status": 200, "headers": headers})


async def send_part(client: Client, data: bytes) -> None:
    """Sends a part of a stream that is not the last part."""
    await client.send({"type": "http.response.body", "body": data, "more_body": True})


async def send_parts(client: Client, parts: AsyncGenerator[bytes, None], keepalive_s: float) -> int:
    """Sends a stream whose events are looked for: `parts` yields them, and empty bytes whenever
    there is none. Ends when `parts` does, or the client has left; returns the status.
    """
    await start_stream(client)
    spoken = time.monotonic()
    gone = asyncio.create_task(until_disconnect(client.receive))
    try:
        async with aclosing(parts):
            async for data in parts:
                if gone.done():
                    break
                now = time.monotonic()
                if data or now - spoken >= keepalive_s:
                    spoken = now
                    await send_part(client, data or b": waiting\n\n")
    finally:
        gone.cancel()
    await client.send({"type": "http.response.body", "body": b""})
    return 200


async def until_disconnect(receive: Receive) -> None:
    """Returns when the client has left. The body was read before."""
    while (await receive())["type"] != "http.disconnect":
        continue
