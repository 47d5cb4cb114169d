"""The waterfalls of resumable streams, whose requests may go from one replica to another.

The replica that has a stream notes in the store what it knows of the request so far. A replica that
adopts the stream reads that, and keeps the waterfall of the whole request at its end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, Final

import orjson

from millrace.proxy.generation.proxy_request import ProxyRequest
from millrace.proxy.tracing.stored_texts import StoredTexts
from millrace.proxy.tracing.timeline import Timeline
from millrace.proxy.tracing.waterfalls import RecentWaterfalls
from millrace.state.store import StoreError

log = logging.getLogger(__name__)

#: A request is noted again after this time, even if it has no new bar: its answer is longer.
NOTE_S: Final = 10.0


class StreamWaterfalls:
    """Of the streams that this replica generates. Used from the event loop only."""

    def __init__(self, recent: RecentWaterfalls, texts: StoredTexts | None) -> None:
        """`recent` keeps the waterfalls of streams that end here. `texts`: those of open streams;
        None: no other replica could read them.
        """
        self._recent = recent
        self._texts = texts
        #: By stream: the bars that were noted, and when.
        self._noted: dict[str, tuple[int, float]] = {}

    def note(self, stream_id: str, request: ProxyRequest) -> None:
        """Writes what is known so far, if it has changed since it was written."""
        if self._texts is None or request.has_ended:
            return
        now = time.monotonic()
        bars, noted_at = self._noted.get(stream_id, (-1, now))
        count = len(request.spans) + len(request.waits) + request.has_begun
        if count == bars and now - noted_at < NOTE_S:
            return
        self._noted[stream_id] = count, now
        self._texts.add(stream_id, orjson.dumps(Timeline.of(request).packed()))

    async def hand_on(self, stream_id: str, request: ProxyRequest, timeout_s: float) -> None:
        """Writes what is known now; another replica may read it when this returns."""
        if self._texts is not None and not request.has_ended:
            self._texts.add(stream_id, orjson.dumps(Timeline.of(request).packed()))
            await self._texts.written(timeout_s)

    async def former(self, stream_id: str) -> Sequence[Any] | None:
        """Returns what the stream's former owner has noted, packed; None: nothing is there."""
        if self._texts is None:
            return None
        try:
            texts = await self._texts.find([stream_id])
        except StoreError as error:  # the stream goes on without it
            log.warning("the waterfall of stream %s so far was not read: %s", stream_id, error)
            return None
        return orjson.loads(texts[0]) if texts else None

    def keep(self, request: ProxyRequest, error: str) -> None:
        """Keeps the waterfall of an adopted request that ended; `error`: as `RecentWaterfalls`."""
        self._recent.add([request], error)

    def leave(self, stream_id: str, *, handed_on: bool) -> None:
        """Forgets a stream that has ended here, or that another replica continues."""
        self._noted.pop(stream_id, None)
        if self._texts is not None and not handed_on:
            self._texts.remove(stream_id)

    async def close(self, timeout_s: float) -> None:
        """Writes what waits; takes `timeout_s` at most."""
        if self._texts is not None:
            await self._texts.close(timeout_s)
