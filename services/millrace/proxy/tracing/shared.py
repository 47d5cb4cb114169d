"""The waterfalls that the replicas of the proxy share: written to the store after each request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from millrace.core.request import RequestState
from millrace.proxy.errors import ApiError, shown, unavailable
from millrace.proxy.tracing.stored_texts import INTERVAL_S, StoredTexts
from millrace.proxy.tracing.waterfalls import Json, document_of
from millrace.state.store import RequestRecord, StoreError
from millrace.wire.codec.request_spec import decode_spec

#: How long the end of a request may be on its way to the store, and how long the waterfall of a
#: request that the store says to have ended.
OPEN_S: Final = 3 * INTERVAL_S
LATE_S: Final = 1.0

#: Returns the record of a request's last incarnation, also of a request that is open at another
#: replica. Raises StoreError.
LatestRecord = Callable[[str], Awaitable[RequestRecord | None]]


class SharedWaterfalls:
    """Writes the waterfalls of this process to the store, and reads those of all processes."""

    def __init__(self, texts: StoredTexts, latest: LatestRecord) -> None:
        self._texts = texts
        self._latest = latest

    def add(self, response_id: str, text: bytes) -> None:
        """Writes a waterfall within INTERVAL_S."""
        self._texts.add(response_id, text)

    async def find(self, response_ids: Sequence[str], tenant: str | None) -> Json | None:
        """Returns the document of the first response of the tenant (None: of any).

        Raises ApiError: 409 if the response is open at another replica, 503 without the store.
        """
        names = [name for one in response_ids for name in (one, f"{one}-0")]
        try:
            found = await self._stored(names, tenant)
            waited_s = 0.0
            while found is None and (state := await self._state(names, tenant)) is not None:
                if waited_s >= (LATE_S if state.is_final else OPEN_S):
                    if state.is_final:
                        break
                    raise _open_elsewhere(response_ids[0])
                await asyncio.sleep(INTERVAL_S)
                waited_s += INTERVAL_S
                found = await self._stored(names, tenant)
        except StoreError as error:
            raise unavailable("The store of waterfalls does not answer.") from error
        return found

    async def _stored(self, names: Sequence[str], tenant: str | None) -> Json | None:
        for text in await self._texts.find(names):
            if (found := document_of(text, tenant)) is not None:
                return found
        return None

    async def _state(self, names: Sequence[str], tenant: str | None) -> RequestState | None:
        """Returns the state of the first of these requests that the store has: of its last
        incarnation.
        """
        for record in await asyncio.gather(*map(self._latest, names)):
            if record is not None and tenant in (None, decode_spec(record.spec).tenant):
                return RequestState(record.state)
        return None

    async def close(self, timeout_s: float) -> None:
        """Writes what waits; takes `timeout_s` at most."""
        await self._texts.close(timeout_s)


def _open_elsewhere(response_id: str) -> ApiError:
    message = (
        f"Request {shown(response_id)} is open at another replica of the proxy, which alone has "
        "its waterfall until it ends."
    )
    return ApiError(409, message, param="request_id", code="request_open")
