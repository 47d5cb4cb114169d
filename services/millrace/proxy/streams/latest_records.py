"""Finds the record of a response's last incarnation, at any replica."""

from __future__ import annotations

import asyncio

from millrace.core.request import RequestState
from millrace.proxy.fleet.migration import MOST_MOVES
from millrace.proxy.streams.source import read_state
from millrace.state.store import RequestRecord, RequestStore
from millrace.state.streams import StreamStore
from millrace.wire.codec.request_spec import decode_spec


class LatestRecords:
    """Reads the records of requests under the ids that migrations and adoptions give them."""

    def __init__(self, store: RequestStore, streams: StreamStore) -> None:
        self._store = store
        self._streams = streams

    async def find(self, response_id: str) -> RequestRecord | None:
        """Returns the record of the last incarnation that the store knows.

        Several choices that were migrated have an incarnation each: the record is of one of them,
        an open one if there is any. Raises StoreError.
        """
        stream, first = await asyncio.gather(
            self._streams.get(response_id), self._store.get(response_id)
        )
        if stream is not None:
            return await self._store.get(read_state(stream.body).incarnation)
        if first is not None and first.state != RequestState.CANCELLED.value:
            return first
        # It was migrated, or is unknown: an incarnation's record outlives it by a minute only.
        choices = 1 if first is None else decode_spec(first.spec).sampling.n
        lineages = [response_id]
        if choices > 1:
            lineages += [f"{response_id}.c{choice}" for choice in range(choices)]
        found = await asyncio.gather(*map(self._last_of, lineages))
        known = [record for record in found if record is not None]
        return next((one for one in known if not RequestState(one.state).is_final), None) or (
            known[0] if known else first
        )

    async def _last_of(self, lineage: str) -> RequestRecord | None:
        names = [f"{lineage}.{number}" for number in range(1, MOST_MOVES + 1)]
        found = await asyncio.gather(*map(self._store.get, names))
        return next((record for record in reversed(found) if record is not None), None)
