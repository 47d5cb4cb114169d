"""Event streams end their lines at line feeds alone."""

from __future__ import annotations

from collections.abc import AsyncIterator

import httpx

from millrace.event_lines import event_lines

#: Line ends of Unicode that an answer may have inside a JSON text.
TEXT = "one\u2028two\u2029three\x85four\x0bfive\x0csix\x1cseven 😀"


class Parts(httpx.AsyncByteStream):
    def __init__(self, data: bytes, length: int) -> None:
        self._parts = [data[first : first + length] for first in range(0, len(data), length)]

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for part in self._parts:
            yield part


async def test_a_line_has_all_of_its_text_wherever_the_parts_end() -> None:
    wanted = [f"data: {TEXT}", "", ": a comment", "", "data: [DONE]", ""]
    for end in ("\n", "\r\n"):
        data = "".join(line + end for line in wanted).encode() + b"data: cut"
        for length in (1, 2, 7, 1000):
            response = httpx.Response(200, stream=Parts(data, length))
            assert [line async for line in event_lines(response)] == wanted
