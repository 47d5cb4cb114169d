"""Writes request states to the store in batches, outside the decision path.

If the store is slow or unreachable, scheduling continues: states wait in a bounded buffer, which
keeps only the last state of each request.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from millrace.core.backoff import Backoff
from millrace.core.scheduler.effects import Record
from millrace.state.store import RequestStore, StateUpdate, StoreError

log = logging.getLogger(__name__)

MAX_BUFFERED = 65_536
RETRY = Backoff(0.1, 5.0)


class Recorder:
    """`put` buffers states; `run` writes them until it is cancelled."""

    def __init__(
        self,
        store: RequestStore,
        *,
        limit: int = MAX_BUFFERED,
        may_write: Callable[[], Awaitable[None]] | None = None,
        retry: Backoff = RETRY,
    ) -> None:
        """`may_write` returns as soon as this scheduler certainly leads; None: it always does."""
        self._store = store
        self._may_write = may_write
        self._limit = limit
        self._retry = retry
        self._pending: dict[str, Record] = {}
        self._wake = asyncio.Event()
        self._written = asyncio.Event()
        self._written.set()
        self.dropped = 0  # states dropped because the buffer was full

    @property
    def buffered(self) -> int:
        return len(self._pending)

    def put(self, record: Record) -> None:
        """Buffers a state without waiting. A full buffer drops its oldest state."""
        self._pending[record.request_id] = record
        if len(self._pending) > self._limit:
            del self._pending[next(iter(self._pending))]
            self.dropped += 1
        self._written.clear()
        self._wake.set()

    async def run(self) -> None:
        failures = 0  # in a row
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._may_write is not None:
                await self._may_write()
            batch, self._pending = self._pending, {}
            try:
                await self._write(batch)
            except StoreError as error:
                self._keep(batch)
                log.warning(
                    "the request store does not answer: %s; %d states wait, %d were dropped",
                    *(error, len(self._pending), self.dropped),
                )
                await asyncio.sleep(self._retry.pause_s(failures))
                failures += 1
                continue
            failures = 0
            if not self._pending:
                self._written.set()

    async def flushed(self) -> None:
        """Returns once all buffered states are written."""
        await self._written.wait()

    async def _write(self, batch: dict[str, Record]) -> None:
        """Writes a batch, which may be written twice: states are set, and the first end stays."""
        updates = [
            StateUpdate(
                request_id=r.request_id,
                state=r.state.value,
                decode_id=r.decode_id or "",
                kv_tokens=r.kv_tokens,
            )
            for r in batch.values()
            if not r.state.is_final
        ]
        if updates:
            await self._store.set_states(updates)
        ends = {r.request_id: r.state.value for r in batch.values() if r.state.is_final}
        if ends:
            await self._store.finish(ends)

    def _keep(self, batch: dict[str, Record]) -> None:
        """Puts back a batch that was not written; newer states of the same requests stay."""
        kept = batch | self._pending
        over = len(kept) - self._limit
        for request_id in list(kept)[: max(over, 0)]:
            del kept[request_id]
            self.dropped += 1
        self._pending = kept
        self._wake.set()
