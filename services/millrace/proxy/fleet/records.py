"""Writes the gateway's requests to the request store."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from millrace.core.errors import MillraceError
from millrace.proxy.errors import ApiError, unavailable
from millrace.proxy.fleet.leftovers import Leftovers
from millrace.proxy.text.encoder_process import TokenArray
from millrace.state.store import IdTaken, JournalEntry, RequestStore
from millrace.wire.fleet_messages import EncodedSpec

log = logging.getLogger(__name__)

#: Endings wait this long, so that many are written in one round trip.
ENDINGS_INTERVAL_S = 0.02


class Records:
    """Creates records before their requests are submitted; writes endings in the background."""

    def __init__(self, store: RequestStore) -> None:
        self._store = store
        #: The final states that are not written yet, by id, and the requests to release after them.
        self._endings: dict[str, str] = {}
        self._releases: list[str] = []
        self._background: set[asyncio.Task[None]] = set()
        self._leftovers = Leftovers()

    async def create(
        self, request_id: str, spec: EncodedSpec, prompt_ids: TokenArray, *, kept: bool
    ) -> bool:
        """Writes a request's spec and prompt; returns False if the id is taken. Raises ApiError
        (503).

        `kept`: another replica may continue the request after the scheduler has ended it.
        """
        create = partial(
            self._store.create, request_id, spec=spec, prompt_ids=prompt_ids, kept=kept
        )
        try:
            try:
                await self._leftovers.create(request_id, create)
            except IdTaken:
                return await self._has(request_id, spec)
        except MillraceError as error:
            raise _away(request_id, error) from error
        return True

    async def _has(self, request_id: str, spec: EncodedSpec) -> bool:
        """Whether an earlier call, whose answer was lost, has written the record."""
        record = await self._store.get(request_id)
        return record is not None and record.spec == spec

    async def begin_journal(self, request_id: str, token_ids: TokenArray) -> None:
        """Writes the tokens of earlier incarnations (int32 [tokens]). Raises ApiError (503)."""
        entry = JournalEntry(request_id=request_id, choice=0, start=0, token_ids=token_ids.tolist())
        try:
            await self._store.append_tokens([entry])
        except MillraceError as error:
            raise _away(request_id, error) from error

    def renew(self, request_ids: Sequence[str]) -> None:
        """Lets the store have these requests for longer."""
        if request_ids:
            self.spawn(self._store.renew(request_ids))

    def finish(self, request_id: str, state: str, *, release: bool = False) -> None:
        """Writes the final state within ENDINGS_INTERVAL_S, and may release a kept request."""
        if not self._endings:
            asyncio.get_running_loop().call_later(ENDINGS_INTERVAL_S, self._write_endings)
        self._endings.setdefault(request_id, state)
        if release:
            self._releases.append(request_id)

    def delete(self, stored: Mapping[str, EncodedSpec]) -> None:
        """Removes what the store has, or may get, of a request's incarnations, whose specs are
        given by id: their ids are free again.
        """
        for request_id, spec in stored.items():
            self._leftovers.add(request_id, partial(self._store.delete, request_id, spec=spec))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs work in the background; `close` waits for it."""
        task = asyncio.create_task(_logged(work))
        self._background.add(task)
        task.add_done_callback(self._background.discard)

    async def close(self, timeout_s: float) -> None:
        """Writes the endings that still wait; takes `timeout_s` at most."""
        self._write_endings()
        if self._background:
            await asyncio.wait(self._background, timeout=timeout_s)
        await self._leftovers.close(timeout_s)

    def _write_endings(self) -> None:
        if self._endings:
            self.spawn(self._end(self._endings, self._releases))
            self._endings, self._releases = {}, []

    async def _end(self, states: Mapping[str, str], releases: Sequence[str]) -> None:
        await self._store.finish(states)
        for request_id in releases:
            await self._store.release(request_id)


def _away(request_id: str, error: MillraceError) -> ApiError:
    log.warning("request %s: %s", request_id, error)
    return unavailable("The request store does not answer.")


async def _logged(work: Coroutine[Any, Any, None]) -> None:
    """Logs a failure of the store. It fails no request, because records expire by themselves."""
    try:
        await work
    except MillraceError as error:
        log.warning("request store: %s", error)
