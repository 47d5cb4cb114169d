"""Answers that a client reads to their end, over as many connections as it takes."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from millrace.event_lines import event_lines
from support.deadlines import HANG_S

RETRY_S = 0.05
#: While a proxy is being started again, or the store is out of reach.
LATER = (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE)


@dataclass
class Answer:
    """A resumable stream: what its client has of it. `error`: the message of an error event."""

    path: str
    body: dict[str, Any]
    chosen_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    token_ids: list[int] = field(default_factory=list)
    arguments: str = ""  # of its tool call
    finish: str = ""
    error: str = ""
    longest_pause_s: float = 0.0  # between two events, since `watch`
    _accepted: bool = False
    _last: str = ""
    _last_s: float = 0.0

    @property
    def content(self) -> tuple[list[int], str, str, str]:
        """All that has to be as in an undisturbed run."""
        return self.token_ids, self.arguments, self.finish, self.error

    async def read(self, client: httpx.AsyncClient) -> Answer:
        """Returns itself at the end of the stream."""
        self._last_s = time.monotonic()
        async with asyncio.timeout(2 * HANG_S):
            while not self.finished:
                with contextlib.suppress(httpx.TransportError):
                    async with self._open(client) as response:
                        await self._read(response)
                await asyncio.sleep(0 if self.finished else RETRY_S)
        return self

    def watch(self) -> None:
        """Measures the longest pause from now on."""
        self.longest_pause_s, self._last_s = 0.0, time.monotonic()

    @property
    def finished(self) -> bool:
        return self._last == "end"

    def _open(self, client: httpx.AsyncClient) -> Any:
        if self._accepted:
            headers = {"last-event-id": self._last} if self._last else {}
            return client.stream("GET", f"/v1/requests/{self.chosen_id}/stream", headers=headers)
        headers = {"x-millrace-resumable": "1", "x-millrace-request-id": self.chosen_id}
        return client.stream("POST", self.path, json=self.body, headers=headers)

    async def _read(self, response: httpx.Response) -> None:
        if response.status_code in LATER:
            return
        if response.status_code == httpx.codes.CONFLICT:  # accepted, but its 200 never came
            self._accepted = True
            return
        assert response.status_code == httpx.codes.OK, (self, await response.aread())
        self._accepted, event_id = True, ""
        async for line in event_lines(response):
            if line.startswith("id: "):
                event_id = line[4:]
            elif line == "data: [DONE]":
                self._last = "end"
                return
            elif line.startswith("data: "):
                self._take(orjson.loads(line[6:]))
                self._last = "end" if self.error else event_id

    def _take(self, chunk: dict[str, Any]) -> None:
        now_s = time.monotonic()
        self.longest_pause_s = max(self.longest_pause_s, now_s - self._last_s)
        self._last_s = now_s
        if "error" in chunk:
            self.error = chunk["error"]["message"]
        for choice in chunk.get("choices", ()):
            self.token_ids += choice.get("token_ids") or ()
            self.finish = choice.get("finish_reason") or self.finish
            for call in choice.get("delta", {}).get("tool_calls") or ():
                self.arguments += call["function"].get("arguments") or ""
