"""The client of one request: where its answer goes, and whether it is still there."""

from __future__ import annotations

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


async def until_disconnect(receive: Receive) -> None:
    """Returns when the client has left. The body was read before."""
    while (await receive())["type"] != "http.disconnect":
        continue
