"""An answer that its client reads to the end, over as many connections as that takes.

What docs/guides/long-streams.md tells clients to do: a resumable stream whose connection breaks is
resumed after its last event, and a request that was refused is sent again with its own id.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson

from millrace.event_lines import event_lines

#: The pause before another connection, in seconds, without a Retry-After.
RETRY_S = 0.05
#: Of a proxy that is being started again, of one whose store or fleet is away, of a full one.
LATER = (httpx.codes.BAD_GATEWAY, httpx.codes.SERVICE_UNAVAILABLE, httpx.codes.TOO_MANY_REQUESTS)
#: Raised where a connection can't be made or breaks. Over uvloop, anyio raises AttributeError when
#: the server closes a connection in the moment in which it was made.
BROKEN = (httpx.TransportError, AttributeError)
#: Codes of error events after which the stream can be resumed.
UNAVAILABLE = "unavailable"
RESUMABLE = ("continued_elsewhere", UNAVAILABLE)


@dataclass
class LastingAnswer:
    """A resumable stream: what its client has of it.

    `error`: the message of an event that ended it, or the body of a response, of which `status` is
    the status. `interruptions`: messages of error events after which it was resumed. `refusals`:
    responses of `LATER`. `breaks`: connections that could not be made, or broke. `forgotten`: how
    often its id had been taken, by what the client knows by itself, and was free again: the replica
    died before it answered. `longest_pause_s`: between two events, in seconds.
    """

    path: str
    body: dict[str, Any]
    chosen_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    token_ids: list[int] = field(default_factory=list)
    arguments: str = ""  # of its tool call
    finish: str = ""
    error: str = ""
    status: int = 0
    interruptions: list[str] = field(default_factory=list)
    refusals: int = 0
    breaks: int = 0
    forgotten: int = 0
    longest_pause_s: float = 0.0
    _accepted: bool = False
    _begun: bool = False  # it got a 200
    _last_id: str = ""
    _last_s: float = 0.0
    _ended: bool = False
    _heard: asyncio.Timeout | None = None  # over when the client has heard nothing for too long
    _silence_s: float = 0.0

    @property
    def content(self) -> tuple[list[int], str, str, str]:
        """All that has to be as in an undisturbed run."""
        return self.token_ids, self.arguments, self.finish, self.error

    async def read(self, client: httpx.AsyncClient, *, silence_s: float) -> LastingAnswer:
        """Returns itself at the end of the stream.

        Raises TimeoutError when no event has come for `silence_s`.
        """
        self._last_s, self._silence_s = time.monotonic(), silence_s
        async with asyncio.timeout(silence_s) as self._heard:
            while True:
                pause_s = RETRY_S
                try:
                    async with self._open(client) as response:
                        pause_s = await self._read(response)
                except BROKEN:
                    self.breaks += 1
                if self._ended:
                    return self
                await asyncio.sleep(pause_s)

    def watch(self) -> None:
        """Measures the longest pause from now on."""
        self.longest_pause_s, self._last_s = 0.0, time.monotonic()

    def _open(self, client: httpx.AsyncClient) -> AbstractAsyncContextManager[httpx.Response]:
        if self._accepted:
            headers = {"last-event-id": self._last_id} if self._last_id else {}
            return client.stream("GET", f"/v1/requests/{self.chosen_id}/stream", headers=headers)
        headers = {"x-millrace-resumable": "1", "x-millrace-request-id": self.chosen_id}
        body = {**self.body, "stream": True}
        return client.stream("POST", self.path, json=body, headers=headers)

    async def _read(self, response: httpx.Response) -> float:
        """Returns the pause before another connection, in seconds."""
        if response.status_code in LATER:
            self.refusals += 1
            with suppress(ValueError):
                return float(response.headers.get("retry-after", RETRY_S))
            return RETRY_S
        if response.status_code == httpx.codes.CONFLICT and not self._accepted:
            self._accepted = True  # its 200 never came
            return 0.0
        if response.status_code == httpx.codes.NOT_FOUND and self._accepted and not self._begun:
            self._accepted = False
            self.forgotten += 1
            return RETRY_S
        if response.status_code != httpx.codes.OK:
            text = (await response.aread()).decode(errors="replace")
            self.error, self.status, self._ended = text, response.status_code, True
            return 0.0
        await self._read_events(response)
        return RETRY_S

    async def _read_events(self, response: httpx.Response) -> None:
        self._accepted = self._begun = True
        event_id = ""
        async for line in event_lines(response):
            if line.startswith("id: "):
                event_id = line[4:]
            elif line == "data: [DONE]":
                self._ended = True
                return
            elif line.startswith("data: "):
                event = orjson.loads(line[6:])
                if "error" in event:
                    self._take_error(event["error"])
                    return
                self._take(event)
                self._last_id = event_id

    def _take_error(self, error: dict[str, Any]) -> None:
        if error.get("code") in RESUMABLE:
            self.interruptions.append(error["message"])
            # Without an event, the request was refused: its id is free.
            self._accepted = bool(self._last_id) or error["code"] != UNAVAILABLE
        else:
            self.error, self._ended = error["message"], True

    def _take(self, event: dict[str, Any]) -> None:
        assert self._heard is not None
        self._heard.reschedule(asyncio.get_running_loop().time() + self._silence_s)
        now_s = time.monotonic()
        self.longest_pause_s = max(self.longest_pause_s, now_s - self._last_s)
        self._last_s = now_s
        for choice in event.get("choices", ()):
            self.token_ids += choice.get("token_ids") or ()
            self.finish = choice.get("finish_reason") or self.finish
            for call in choice.get("delta", {}).get("tool_calls") or ():
                self.arguments += call["function"].get("arguments") or ""
