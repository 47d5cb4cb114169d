"""Writes the request of a stream again, which the store has lost with its data."""

from __future__ import annotations

import contextlib

from millrace.core.request import RequestState
from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.state.store import IdTaken, JournalEntry, RequestStore


async def journal_tokens(
    store: RequestStore, incarnation: str, request: ProxyRequest, start: int
) -> int:
    """Journals the request's tokens after the first `start` tokens. Returns how many these are.
    Raises StoreError.
    """
    tokens = request.emitted_after(start)
    if tokens:
        entry = JournalEntry(request_id=incarnation, choice=0, start=start, token_ids=tokens)
        await store.append_tokens([entry])
    return len(tokens)


class Rewriting:
    """The record and the journal of one stream's request, after a loss. Methods raise StoreError.

    The decode instance goes on to journal the tokens that it computes. What it appends before the
    earlier tokens are there again is out of order and does not count, so the stream's owner writes
    all tokens of this incarnation, as they come. The next incarnation has a whole journal.
    """

    def __init__(self, store: RequestStore) -> None:
        self._store = store
        self._incarnation = ""  # that is written; none so far
        self._tokens = 0

    async def begin(self, request: ProxyRequest, final: RequestState | None) -> None:
        """Records the request, its tokens so far and its final state, if it has one. The record has
        the spec of the first one, by which it is removed.

        A request that moves to another instance is about to be recorded anyway.
        """
        if not request.recorded:
            return
        incarnation = request.spec.request_id
        with contextlib.suppress(IdTaken):  # the loss was of the stream's record alone
            await self._store.create(
                incarnation,
                spec=request.stored[incarnation],
                prompt_ids=request.prompt_ids,
                kept=True,
            )
        self._incarnation, self._tokens = incarnation, 0
        await self.follow(request)
        if final is not None:
            await self._store.finish({incarnation: final.value})

    async def follow(self, request: ProxyRequest) -> None:
        """Writes the tokens that have come since, if the incarnation is one that was lost."""
        if request.spec.request_id != self._incarnation:
            return
        self._tokens += await journal_tokens(self._store, self._incarnation, request, self._tokens)
