"""Sends one prompt's K/V to several receivers, each of which holds a shard of its tokens (KVP)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from millrace.concurrency import all_or_first_error
from millrace.core.errors import TransferError
from millrace.transfer.push.control import SendTimings, Target
from millrace.transfer.push.send.session import SendSession


class SpreadSession:
    """Joins one `SendSession` per receiver; made by `SendManager.open_spread`. A `Sending`.

    If one session fails, the whole fails. The sessions send in parallel and never wait for each
    other.
    """

    def __init__(self, shares: Sequence[tuple[Target, SendSession]]) -> None:
        """`shares`: the receivers that this instance has KV or a message for."""
        self._shares = shares
        self._sessions = [session for _, session in shares]
        self._opened_s = time.monotonic()

    @property
    def failure(self) -> TransferError | None:
        return next((s.failure for s in self._sessions if s.failure is not None), None)

    @property
    def receiver_ids(self) -> tuple[str, ...]:
        return tuple(s.ticket.receiver.id for s in self._sessions)

    @property
    def timings(self) -> SendTimings:
        """Returns the timings of all: granted with the last grant, written from the first to the
        last write.
        """
        every = [session.timings for session in self._sessions]
        granted = [one.granted_s for one in every]
        return SendTimings(
            opened_s=min((one.opened_s for one in every), default=self._opened_s),
            granted_s=max(granted, default=0.0) if all(granted) else 0.0,
            first_write_s=min((t for one in every if (t := one.first_write_s)), default=0.0),
            last_write_s=max((one.last_write_s for one in every), default=0.0),
            bytes=sum(one.bytes for one in every),
            writes=sum(one.writes for one in every),
        )

    def layer_ready(self, chunk_index: int, layer: int, start_token: int, num_tokens: int) -> None:
        end_token = start_token + num_tokens
        for target, session in self._shares:
            start = max(target.start_token, start_token)
            stop = min(target.end_token, end_token)
            if start < stop:
                session.layer_ready(chunk_index, layer, start, stop - start)

    async def opened(self) -> None:
        await asyncio.gather(*(session.opened() for session in self._sessions))

    async def finish(self, message: Any | None) -> None:  # noqa: ANN401 - the wire's type
        """Sends every receiver its message, which `Target.final_message` makes.

        The KV owner gets its message after all receivers have answered the handshake, so that a
        refusal is known before the first token is out. It does not wait for receivers that queued
        the handshake, since these may wait for the KV owner.
        """
        if (failure := self.failure) is not None:
            raise failure
        await all_or_first_error(
            self._finish(target, session, message) for target, session in self._shares
        )

    async def abort(self, reason: str) -> None:
        await asyncio.gather(*(session.abort(reason) for session in self._sessions))

    async def _finish(self, target: Target, session: SendSession, message: Any | None) -> None:  # noqa: ANN401 - as above
        if message is None or target.final_message is None:
            await session.finish(None)
            return
        if target.is_owner:
            await asyncio.gather(*(other.answered() for other in self._sessions))
            if (failure := self.failure) is not None:
                raise failure
        await session.finish(target.final_message(message))
