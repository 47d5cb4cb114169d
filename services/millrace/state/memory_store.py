"""Keeps the request store inside one process: for tests and tools that run without Redis."""

from __future__ import annotations

import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from millrace.core.config import StoreConfig
from millrace.core.request import RequestState
from millrace.state.store import (
    LEASE_S,
    IdTaken,
    JournalEntry,
    JournalPart,
    RequestRecord,
    StateUpdate,
    check_found,
    check_new_request,
    check_slice,
)


@dataclass(slots=True, kw_only=True, eq=False)
class _Entry:
    state: str
    spec: bytes
    prompt_tokens: int
    prompt: npt.NDArray[np.int32] | None  # None once finished and not kept
    expires_s: float
    kept: bool
    final: bool = False
    decode_id: str = ""
    kv_tokens: int = 0
    journal: dict[int, list[int]] = field(default_factory=dict)


class MemoryStore:
    """A RequestStore in a dictionary. `clock` returns seconds that never decrease."""

    def __init__(self, config: StoreConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._ttl_s = config.ttl_s
        self._finished_ttl_s = config.finished_ttl_s
        self._clock = clock
        self._entries: dict[str, _Entry] = {}
        self._deadlines: list[tuple[float, str]] = []  # heap, with deleted requests

    def __len__(self) -> int:
        """Returns the number of requests in memory, with expired requests that were not dropped
        yet.
        """
        return len(self._entries)

    async def create(
        self,
        request_id: str,
        *,
        spec: bytes,
        prompt_ids: npt.NDArray[np.int32],
        kept: bool = False,
    ) -> None:
        check_new_request(request_id, prompt_ids)
        self._drop_expired()
        known = self._entries.get(request_id)
        if known is not None and not (kept and known.kept):
            raise IdTaken(f"request {request_id} is in the store already")
        self._entries[request_id] = _Entry(
            state=RequestState.QUEUED.value,
            spec=spec,
            prompt_tokens=prompt_ids.size,
            prompt=prompt_ids.copy(),
            expires_s=0.0,
            kept=kept,
        )
        self._expire(request_id, min(self._ttl_s, LEASE_S))

    async def prompt_ids(
        self, request_id: str, start: int = 0, stop: int | None = None
    ) -> npt.NDArray[np.int32]:
        check_slice(request_id, start, stop)
        entry = self._find(request_id)
        prompt = entry.prompt if entry is not None else None
        ids = np.empty(0, dtype=np.int32) if prompt is None else prompt[start:stop].copy()
        check_found(request_id, start, stop, ids.size)
        return ids

    async def prompt_slices(
        self, request_id: str, slices: Sequence[tuple[int, int]]
    ) -> list[npt.NDArray[np.int32]]:
        return [await self.prompt_ids(request_id, start, stop) for start, stop in slices]

    async def renew(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            entry = self._find(request_id)
            if entry is not None and not entry.final:
                lease_s = self._ttl_s if entry.kept else LEASE_S
                self._expire(request_id, min(self._ttl_s, lease_s))

    async def set_states(self, updates: Sequence[StateUpdate]) -> None:
        for update in updates:
            entry = self._find(update.request_id)
            if entry is not None and not entry.final:
                entry.state = update.state
                entry.decode_id = update.decode_id or entry.decode_id
                entry.kv_tokens = update.kv_tokens

    async def append_tokens(self, entries: Sequence[JournalEntry]) -> None:
        for addition in entries:
            entry = self._find(addition.request_id)
            if entry is not None:
                known = entry.journal.setdefault(addition.choice, [])
                if addition.start <= len(known):
                    known.extend(addition.token_ids[len(known) - addition.start :])

    async def journal(self, request_id: str, choice: int) -> npt.NDArray[np.int32]:
        entry = self._find(request_id)
        return np.array([] if entry is None else entry.journal.get(choice, []), dtype=np.int32)

    async def journal_after(
        self, request_id: str, choice: int, *, known: int, place: int
    ) -> JournalPart:
        ids = await self.journal(request_id, choice)
        return JournalPart(token_ids=ids[known:], place=place)

    async def get(self, request_id: str) -> RequestRecord | None:
        entry = self._find(request_id)
        if entry is None:
            return None
        return RequestRecord(
            request_id=request_id,
            state=entry.state,
            decode_id=entry.decode_id,
            spec=entry.spec,
            prompt_tokens=entry.prompt_tokens,
            kv_tokens=entry.kv_tokens,
        )

    async def finish(self, states: Mapping[str, str]) -> None:
        for request_id, state in states.items():
            entry = self._find(request_id)
            if entry is None or entry.final:
                continue
            entry.state, entry.final = state, True
            if not entry.kept:
                await self.release(request_id)

    async def release(self, request_id: str) -> None:
        entry = self._find(request_id)
        if self._finished_ttl_s == 0:
            await self.delete(request_id)
        elif entry is not None:
            entry.prompt, entry.kept = None, False
            self._expire(request_id, self._finished_ttl_s)

    async def delete(self, request_id: str, *, spec: bytes | None = None) -> bool:
        entry = self._find(request_id)
        if entry is None or spec not in (None, entry.spec):
            return False
        del self._entries[request_id]
        return True

    async def ping(self) -> None:
        return

    async def close(self) -> None:
        self._entries.clear()
        self._deadlines.clear()

    def _find(self, request_id: str) -> _Entry | None:
        entry = self._entries.get(request_id)
        return entry if entry is not None and entry.expires_s > self._clock() else None

    def _expire(self, request_id: str, ttl_s: float) -> None:
        deadline_s = self._clock() + ttl_s
        self._entries[request_id].expires_s = deadline_s
        heapq.heappush(self._deadlines, (deadline_s, request_id))

    def _drop_expired(self) -> None:
        now_s = self._clock()
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, request_id = heapq.heappop(self._deadlines)
            entry = self._entries.get(request_id)
            if entry is not None and entry.expires_s <= now_s:
                del self._entries[request_id]
