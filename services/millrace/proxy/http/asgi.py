"""Raw ASGI: reads a bounded body, writes small answers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import orjson

from millrace.proxy.errors import ApiError
from millrace.proxy.http.anthropic import error_body

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

JSON = [(b"content-type", b"application/json")]

#: Where the headers are in the scope, by name: the first of each.
_BY_NAME = "millrace.headers"
#: The time and the bytes for which a refused body is read, so that its sender gets the answer.
_LINGER_S = 5.0
_LINGER_BYTES = 1 << 30
#: The longest wait for the next bytes of a body.
SILENCE_S = 75.0


class Disconnected(Exception):
    """The client left before its request was complete."""


def header(scope: Scope, name: bytes) -> str | None:
    """Returns the first value of a header, or None; `name` is lower case."""
    headers = scope.get(_BY_NAME)
    if headers is None:  # an endpoint looks for a dozen headers
        headers = scope[_BY_NAME] = dict(reversed(scope["headers"]))
    value = headers.get(name)
    return None if value is None else str(value.decode("latin-1"))


async def receive_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    """Returns the body of a request, which should be JSON.

    Raises ApiError: 415 for another content type, 413 as soon as the body is known to be too large.
    Raises Disconnected when the client leaves.
    """
    content_type = (header(scope, b"content-type") or "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(
            415,
            f"Content-Type must be application/json, got {content_type[:80] or 'none'!r}.",
            param="Content-Type",
            code="unsupported_media_type",
        )
    if (header(scope, b"content-encoding") or "identity") != "identity":
        raise ApiError(
            415,
            "Content-Encoding must be identity.",
            param="Content-Encoding",
            code="unsupported_media_type",
        )
    return await _read_body(scope, receive, max_bytes)


async def _read_body(scope: Scope, receive: Receive, max_bytes: int) -> bytes:
    declared = header(scope, b"content-length")
    if declared is not None and declared.isdigit() and int(declared) > max_bytes:
        raise too_large(max_bytes)
    message = await next_part(receive)
    body = message.get("body", b"")
    if not message.get("more_body"):
        if len(body) > max_bytes:
            raise too_large(max_bytes)
        return bytes(body)
    parts, size = [body], len(body)
    while message.get("more_body"):
        if size > max_bytes:
            raise too_large(max_bytes)
        message = await next_part(receive)
        parts.append(message.get("body", b""))
        size += len(parts[-1])
    if size > max_bytes:
        raise too_large(max_bytes)
    return b"".join(parts)


async def next_part(receive: Receive) -> Message:
    """Returns the next piece of a body.

    Raises Disconnected when the client leaves, and ApiError (408) when it sends nothing for long.
    """
    try:
        async with asyncio.timeout(SILENCE_S):
            message = await receive()
    except TimeoutError:
        raise ApiError(
            408,
            f"The request's body was not complete: no bytes came for {SILENCE_S:g} s.",
            code="timeout",
            headers=[(b"connection", b"close")],
        ) from None
    if message["type"] == "http.disconnect":
        raise Disconnected
    return message


def too_large(max_bytes: int) -> ApiError:
    return ApiError(
        413, f"The request body is larger than {max_bytes} bytes.", code="body_too_large"
    )


async def send_json(
    send: Send,
    status: int,
    body: bytes,
    headers: list[tuple[bytes, bytes]] | None = None,
) -> None:
    """Sends one complete JSON answer."""
    await send(
        {
            "type": "http.response.start",
            "status": status,
            "headers": [
                (b"content-length", b"%d" % len(body)),
                *(headers or JSON),
            ],
        }
    )
    await send({"type": "http.response.body", "body": body})


async def send_document(send: Send, document: object) -> int:
    """Sends a document of JSON, with the status 200, which is returned."""
    await send_json(send, 200, orjson.dumps(document))
    return 200


async def send_error(scope: Scope, receive: Receive, send: Send, error: ApiError) -> None:
    """Answers with an error in the form of the path's API.

    Reads a refused body for a while before it closes the connection.
    """
    body = error_body(scope, error)
    if error.status != 413:
        await send_json(send, error.status, body, error.headers())
        return
    headers = [(b"content-length", b"%d" % len(body)), (b"connection", b"close")]
    await send(
        {
            "type": "http.response.start",
            "status": error.status,
            "headers": headers + error.headers(),
        }
    )
    await send({"type": "http.response.body", "body": body, "more_body": True})
    # Closing now would reset the connection under a client that still writes, and lose the answer.
    await _drain(receive)
    await send({"type": "http.response.body", "body": b""})


async def _drain(receive: Receive) -> None:
    try:
        async with asyncio.timeout(_LINGER_S):
            size, more = 0, True
            while more and size < _LINGER_BYTES:
                message = await next_part(receive)
                size += len(message.get("body", b""))
                more = bool(message.get("more_body"))
    except (TimeoutError, Disconnected):
        return
