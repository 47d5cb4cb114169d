"""Generates responses in the background: they need no client, and are written to the store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from millrace.concurrency import cancel
from millrace.proxy.errors import ApiError
from millrace.proxy.reply.response import ResponseReply
from millrace.proxy.responses import StoredResponses

log = logging.getLogger(__name__)

#: The shortest time between two changes of one response in the store.
SAVE_S = 0.05
#: A silent response renews its lease this often, and learns then of a cancellation elsewhere.
HEARTBEAT_S = 0.5
#: Time for the last changes at shutdown. A response that needs more is lost with its lease.
CLOSE_S = 2.0


class Background:
    """Runs stored responses to their end."""

    def __init__(self, stored: StoredResponses) -> None:
        self._stored = stored
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start(
        self,
        reply: ResponseReply,
        *,
        submit: Callable[[], Awaitable[None]],
        end: Callable[[], None],
        settle: Callable[[], Awaitable[None]],
    ) -> None:
        """Starts a response that is in the store.

        `submit` hands its requests to the gateway; `end` cancels the requests that have not ended.
        `settle` runs when the output is complete, before clients see that, and again if the store
        did not answer then; it raises no ApiError.
        """
        task = asyncio.create_task(self._run(reply, submit, end, settle))
        self._tasks[reply.response_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(reply.response_id))

    async def close(self) -> None:
        """Lets responses write their ends. The gateway has ended their requests before."""
        tasks = list(self._tasks.values())
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_S)
        await cancel(*tasks)

    async def _run(
        self,
        reply: ResponseReply,
        submit: Callable[[], Awaitable[None]],
        end: Callable[[], None],
        settle: Callable[[], Awaitable[None]],
    ) -> None:
        progress = reply.progress
        try:
            await submit()
            await self._follow(reply, settle)
        except ApiError as error:
            progress.fail(error)
        except Exception:
            log.exception("response %s failed", reply.response_id)
            progress.fail(ApiError(500, "Internal error."))
        finally:
            end()
        if progress.error is not None and progress.error.status != 499:
            reply.fail(progress.error)
            await self._save(reply, 0)

    async def _follow(self, reply: ResponseReply, settle: Callable[[], Awaitable[None]]) -> None:
        """Writes the output as it comes; returns at its end, or when the response was cancelled."""
        progress, stored_events = reply.progress, 0
        while progress.error is None:
            finished, events = progress.finished, len(reply.events)
            if finished:
                await settle()
            wanted = await self._save(reply, stored_events)
            if wanted is False or (wanted and finished):
                return
            if wanted:
                stored_events = events
            await asyncio.sleep(SAVE_S)
            await _wait(reply, HEARTBEAT_S)

    async def _save(self, reply: ResponseReply, first_event: int) -> bool | None:
        """Returns whether the response is wanted, or None if the store is out of reach."""
        try:
            return await self._stored.save(reply, first_event)
        except ApiError as error:
            log.warning("response %s: %s", reply.response_id, error)
            return None


async def _wait(reply: ResponseReply, most_s: float) -> None:
    """Returns at new output or at the end, after `most_s` at the latest."""
    if reply.progress.finished:
        return
    try:
        async with asyncio.timeout(most_s):
            await reply.progress.signal.wait()
    except TimeoutError:
        return
