"""The waterfalls that the replicas of the proxy share: written to the store after each request."""

from __future__ import annotations

import asyncio
import logging
import zlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Final

from millrace.core.request import RequestState
from millrace.proxy.errors import ApiError, shown, unavailable
from millrace.proxy.tracing.waterfalls import Json, document_of
from millrace.state.store import RequestRecord, StoreError
from millrace.state.waterfalls import RedisWaterfalls
from millrace.wire.codec.request_spec import decode_spec

log = logging.getLogger(__name__)

#: Waterfalls wait this long, so that many are written in one round trip.
INTERVAL_S: Final = 0.05
#: How long the end of a request may be on its way to the store, and how long the waterfall of a
#: request that the store says to have ended.
OPEN_S: Final = 3 * INTERVAL_S
LATE_S: Final = 1.0
#: A larger waterfall is compressed; for smaller ones that costs more time than memory is worth.
SMALL_BYTES: Final = 2048
#: The largest waterfall that is written, compressed.
MOST_BYTES: Final = 64 << 10

#: Returns the record of a request's last incarnation, also of a request that is open at another
#: replica. Raises StoreError.
LatestRecord = Callable[[str], Awaitable[RequestRecord | None]]


class SharedWaterfalls:
    """Writes the waterfalls of this process to the store, and reads those of all processes."""

    def __init__(self, store: RedisWaterfalls, latest: LatestRecord) -> None:
        self._store = store
        self._latest = latest
        self._waiting: dict[str, bytes] = {}
        self._writing: set[asyncio.Task[None]] = set()

    def add(self, response_id: str, text: bytes) -> None:
        """Writes a waterfall within INTERVAL_S."""
        if not self._waiting:
            asyncio.get_running_loop().call_later(INTERVAL_S, self._write_waiting)
        self._waiting[response_id] = text

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
        for packed in await self._store.find(names):
            if packed is None:
                continue
            text = packed if packed.startswith(b"[") else zlib.decompress(packed)
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
        self._write_waiting()
        if self._writing:
            await asyncio.wait(self._writing, timeout=timeout_s)
        await self._store.close()

    def _write_waiting(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, {}
        task = asyncio.create_task(self._write(waiting))
        self._writing.add(task)
        task.add_done_callback(self._writing.discard)

    async def _write(self, texts: Mapping[str, bytes]) -> None:
        packed = texts
        if any(len(text) > SMALL_BYTES for text in texts.values()):
            packed = await asyncio.to_thread(_compressed, texts)
        try:
            await self._store.put(packed)
        except StoreError as error:  # it fails no request
            log.warning("%d waterfalls were not written: %s", len(packed), error)


def _compressed(texts: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns what is written: large waterfalls compressed, and none that is too large."""
    packed = {
        name: text if len(text) <= SMALL_BYTES else zlib.compress(text, 1)
        for name, text in texts.items()
    }
    return {name: one for name, one in packed.items() if len(one) <= MOST_BYTES}


def _open_elsewhere(response_id: str) -> ApiError:
    message = (
        f"Request {shown(response_id)} is open at another replica of the proxy, which alone has "
        "its waterfall until it ends."
    )
    return ApiError(409, message, param="request_id", code="request_open")
