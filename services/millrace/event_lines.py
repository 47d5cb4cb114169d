"""Reads the lines of an event stream (SSE): a line feed ends a line, and nothing else.

`httpx.Response.aiter_lines` also ends lines at U+0085, U+2028 and others, which the text of an
answer may have: they cut its JSON in two.
"""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx


async def event_lines(response: httpx.Response) -> AsyncIterator[str]:
    """Yields the lines of a streamed body as they come, without their ends. What follows the last
    line feed is no line.

    Raises httpx.TransportError when the connection breaks.
    """
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.removesuffix(b"\r").decode()
