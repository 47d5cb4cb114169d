"""Writes emitted tokens to the request store in batches, off the per-token path."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

from millrace.state.store import JournalEntry, RequestStore, StoreError

log = logging.getLogger(__name__)

MOST_WAITING_TOKENS = 1 << 20


@dataclass(slots=True)
class _Waiting:
    """Tokens of one choice that follow its first `start` tokens."""

    start: int
    token_ids: list[int] = field(default_factory=list)


class Journal:
    """Flushes tokens at a fixed interval. While the store is away, the tokens wait; the tokens that
    are too many are dropped, the oldest first."""

    def __init__(self, store: RequestStore, interval_s: float) -> None:
        self._store = store
        self._interval_s = interval_s
        self._waiting: dict[tuple[str, int], _Waiting] = {}
        self._tokens = 0

    def add(self, request_id: str, choice: int, start: int, token_ids: Sequence[int]) -> None:
        """Takes tokens that follow the first `start` tokens of the choice."""
        waiting = self._waiting.setdefault((request_id, choice), _Waiting(start))
        waiting.token_ids.extend(token_ids)
        self._tokens += len(token_ids)
        self._drop()

    async def run(self) -> None:
        """Flushes until cancelled."""
        while True:
            await asyncio.sleep(self._interval_s)
            await self.flush()

    async def flush(self) -> None:
        """Writes the waiting tokens. An unreachable store is logged and fails no request."""
        if not self._waiting:
            return
        written, self._waiting, self._tokens = self._waiting, {}, 0
        entries = [
            JournalEntry(
                request_id=request_id,
                choice=choice,
                start=waiting.start,
                token_ids=waiting.token_ids,
            )
            for (request_id, choice), waiting in written.items()
        ]
        try:
            await self._store.append_tokens(entries)
        except StoreError as error:
            log.warning("journal of %d requests not written yet: %s", len(entries), error)
            self._wait_again(written)

    def _wait_again(self, written: dict[tuple[str, int], _Waiting]) -> None:
        """Puts tokens that were not written before those that came meanwhile."""
        for key, waiting in self._waiting.items():
            earlier = written.setdefault(key, waiting)
            if earlier is not waiting:
                earlier.token_ids.extend(waiting.token_ids)
        self._waiting = written
        self._tokens = sum(len(one.token_ids) for one in written.values())
        self._drop()

    def _drop(self) -> None:
        while self._tokens > MOST_WAITING_TOKENS:
            oldest = next(iter(self._waiting))
            self._tokens -= len(self._waiting.pop(oldest).token_ids)
