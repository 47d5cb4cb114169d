"""Writes emitted tokens to the request store in batches, off the per-token path."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable

from millrace.state.store import JournalEntry, RequestStore, StoreError

log = logging.getLogger(__name__)

MOST_WAITING_TOKENS = 1 << 20


class Journal:
    """Flushes tokens at a fixed interval; while the store is away, drops the oldest tokens."""

    def __init__(self, store: RequestStore, interval_s: float) -> None:
        self._store = store
        self._interval_s = interval_s
        self._waiting: dict[tuple[str, int], list[int]] = {}
        self._tokens = 0

    def add(self, request_id: str, choice: int, token_ids: Iterable[int]) -> None:
        entry = self._waiting.setdefault((request_id, choice), [])
        before = len(entry)
        entry.extend(token_ids)
        self._tokens += len(entry) - before
        while self._tokens > MOST_WAITING_TOKENS:
            oldest = next(iter(self._waiting))
            self._tokens -= len(self._waiting.pop(oldest))

    async def run(self) -> None:
        """Flushes until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.flush()

    async def flush(self) -> None:
        """Writes the waiting tokens. An unreachable store is logged and fails no request."""
        if not self._waiting:
            return
        entries = [
            JournalEntry(request_id=request_id, choice=choice, token_ids=token_ids)
            for (request_id, choice), token_ids in self._waiting.items()
        ]
        self._waiting.clear()
        self._tokens = 0
        try:
            await self._store.append_tokens(entries)
        except StoreError as error:
            log.warning("journal of %d requests not written: %s", len(entries), error)
