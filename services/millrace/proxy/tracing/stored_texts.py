"""Writes waterfalls to the store in batches, and reads them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import zlib
from collections.abc import Mapping, Sequence
from typing import Final

from millrace.concurrency import cancel
from millrace.state.store import StoreError
from millrace.state.waterfalls import RedisWaterfalls

log = logging.getLogger(__name__)

#: Waterfalls wait this long, so that many are written in one round trip.
INTERVAL_S: Final = 0.05
#: A larger waterfall is compressed; for smaller ones that costs more time than memory is worth.
SMALL_BYTES: Final = 2048
#: The largest waterfall that is written, compressed.
MOST_BYTES: Final = 64 << 10


class _Batch:
    """Texts that wait to be written; an empty text: it is to be removed."""

    def __init__(self) -> None:
        self.texts: dict[str, bytes] = {}
        self.is_urgent, self.is_written = asyncio.Event(), asyncio.Event()


class StoredTexts:
    """The JSON texts of waterfalls, by the id of the response. A text begins with `[`.

    One batch is written at a time, so that the latest text of a response is written last.
    """

    def __init__(self, store: RedisWaterfalls) -> None:
        self._store = store
        self._batch = _Batch()
        self._writer: asyncio.Task[None] | None = None

    def add(self, response_id: str, text: bytes) -> None:
        """Writes a text after INTERVAL_S, in the place of an earlier text."""
        self._batch.texts[response_id] = text
        if self._writer is None:
            self._writer = asyncio.create_task(self._write_all())

    def remove(self, response_id: str) -> None:
        """Removes a text after INTERVAL_S."""
        self.add(response_id, b"")

    async def written(self, timeout_s: float) -> None:
        """Writes all texts at once; returns when they are written, or after `timeout_s`."""
        batch = self._batch
        batch.is_urgent.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                if batch.texts:
                    await batch.is_written.wait()
                elif self._writer is not None:
                    await asyncio.wait([self._writer])

    async def find(self, response_ids: Sequence[str]) -> list[bytes]:
        """Returns the texts that are there, in the order of the ids. Raises StoreError."""
        found = await self._store.find(response_ids)
        return [_plain(packed) for packed in found if packed is not None]

    async def close(self, timeout_s: float) -> None:
        """Writes what waits; takes `timeout_s` at most."""
        await self.written(timeout_s)
        if self._writer is not None:
            await cancel(self._writer)
        await self._store.close()

    async def _write_all(self) -> None:
        try:
            while self._batch.texts:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(INTERVAL_S):
                        await self._batch.is_urgent.wait()
                batch, self._batch = self._batch, _Batch()
                await self._write(batch.texts)
                batch.is_written.set()
        finally:
            self._writer = None

    async def _write(self, texts: Mapping[str, bytes]) -> None:
        packed = {name: text for name, text in texts.items() if text}
        if any(len(text) > SMALL_BYTES for text in packed.values()):
            packed = await asyncio.to_thread(_compressed, packed)
        try:
            await self._store.put(packed)
            await self._store.remove([name for name, text in texts.items() if not text])
        except StoreError as error:  # it fails no request
            log.warning("%d waterfalls were not written: %s", len(texts), error)


def _plain(packed: bytes) -> bytes:
    return packed if packed.startswith(b"[") else zlib.decompress(packed)


def _compressed(texts: Mapping[str, bytes]) -> dict[str, bytes]:
    """Returns what is written: large waterfalls compressed, and none that is too large."""
    packed = {
        name: text if len(text) <= SMALL_BYTES else zlib.compress(text, 1)
        for name, text in texts.items()
    }
    return {name: one for name, one in packed.items() if len(one) <= MOST_BYTES}
