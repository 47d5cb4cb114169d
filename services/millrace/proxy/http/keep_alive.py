"""Speaks on streams that wait: comments on silent streams, and events of a prompt's progress."""

from __future__ import annotations

import asyncio

from millrace.core.config import ProxyConfig
from millrace.proxy.fleet.prompts_ahead import PromptsAhead
from millrace.proxy.reply.reply import EventReply


class KeepAlive:
    """Writes to one stream until `close`.

    A stream that was silent for one to two `proxy.keepalive_s` gets a comment, so that no proxy in
    between closes the connection. A stream whose client asked for its progress gets an event every
    `proxy.progress_interval_s` until the first token.
    """

    def __init__(
        self, reply: EventReply, prompts: PromptsAhead, config: ProxyConfig, response_id: str
    ) -> None:
        self._reply = reply
        self._prompts = prompts
        self._response_id = response_id
        self._loop = asyncio.get_running_loop()
        self._comments_s = config.keepalive_s
        self._events_s = config.progress_interval_s if reply.shows_progress else 0.0
        self._timer = self._loop.call_later(self._interval_s, self._tick)
        self._speaking: asyncio.Task[None] | None = None

    def close(self) -> None:
        self._timer.cancel()
        if self._speaking is not None:
            self._speaking.cancel()

    @property
    def _interval_s(self) -> float:
        return self._events_s or self._comments_s

    def _tick(self) -> None:
        idle = self._speaking is None or self._speaking.done()
        if idle and (self._events_s or self._reply.silent):
            self._speaking = asyncio.create_task(self._speak())
        self._reply.silent = True
        self._timer = self._loop.call_later(self._interval_s, self._tick)

    async def _speak(self) -> None:
        report = await self._prompts.report(self._reply.progress.requests)
        if report is not None and self._events_s:
            self._reply.show_progress({"id": self._response_id, **report.to_dict()})
        elif report is None and self._events_s:
            self._events_s = 0.0  # the first token is out: from now on there are comments only
        else:
            line = "waiting" if report is None else report.line()
            self._reply.comment(line.encode())
