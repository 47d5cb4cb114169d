"""The files of all tenants: bytes in blobs, records in the store, each for its tenant only.

A blob's name gets a deadline before the blob is written, and the sweep removes the blob after it.
So bytes whose upload broke off, or whose file expired, are removed although no record names them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from millrace.concurrency import cancel
from millrace.core.config import FilesConfig
from millrace.proxy import errors
from millrace.proxy.errors import ApiError
from millrace.proxy.files.objects import File, Part, decode_file
from millrace.proxy.files.pages import Page, PageWanted, read_page
from millrace.state.blobs import BlobMissing, Blobs, BlobWriter
from millrace.state.records import Deadlines, Record, RecordStore
from millrace.state.store import StoreError

log = logging.getLogger(__name__)

#: A blob outlives the record of its file by this, for readers that have begun, and for proxies
#: whose clocks differ.
GRACE_S = 3600.0
#: Time between two sweeps of a process, and the blobs that one of them removes.
SWEEP_S = 60.0
SWEEP_BLOBS = 256


class Files:
    """Keeps files. Methods raise ApiError: 404 for an unknown file, 503 if a store fails."""

    def __init__(
        self,
        records: RecordStore,
        deadlines: Deadlines,
        blobs: Blobs,
        config: FilesConfig,
        clock: Callable[[], float],
        folder: Path | None = None,
    ) -> None:
        """`clock` returns Unix time, s. `folder` is removed by `close`."""
        self._records = records
        self._deadlines = deadlines
        self._blobs = blobs
        self._clock = clock
        self._folder = folder
        self._sweeping: asyncio.Task[None] | None = None
        self.config = config

    def start(self) -> None:
        """Removes bytes that are no longer needed, from now on."""
        self._sweeping = asyncio.create_task(self._sweep_always())

    async def close(self) -> None:
        if self._sweeping is not None:
            await cancel(self._sweeping)
        await self._records.close()
        await self._deadlines.close()
        if self._folder is not None:
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    @asynccontextmanager
    async def blob(self, lifetime_s: float) -> AsyncIterator[tuple[str, BlobWriter]]:
        """Writes a blob of a new name that lives for `lifetime_s`: yields its name and writer."""
        name = uuid.uuid4().hex
        with reachable():
            await self._deadlines.set([name], self._clock() + lifetime_s + GRACE_S)
            async with self._blobs.writer(name) as writer:
                yield name, writer

    async def add(
        self,
        parts: Sequence[Part],
        *,
        tenant: str,
        filename: str,
        purpose: str,
        lifetime_s: float,
        file_id: str | None = None,
    ) -> File:
        """Records a file of blobs that were written. From now on they live as long as the file.

        A file of the same id is replaced.
        """
        now_s = self._clock()
        file = File(
            id=file_id or f"file-{uuid.uuid4().hex}",
            tenant=tenant,
            filename=filename,
            purpose=purpose,
            created_at=int(now_s),
            expires_at=int(now_s + lifetime_s),
            parts=parts,
        )
        with reachable():
            await self._deadlines.set(file.blobs, now_s + lifetime_s + GRACE_S)
            await self._records.create(
                file.id,
                tenant=tenant,
                body=file.encoded(),
                at_s=now_s,
                ttl_s=lifetime_s,
                final=True,
            )
        return file

    async def find(self, file_id: str, tenant: str) -> File:
        with reachable():
            record = await self._records.get(file_id)
        if record is None or record.tenant != tenant:
            raise no_such_file(file_id)
        return decode_file(record.body)

    async def page(self, tenant: str, wanted: PageWanted, purpose: str | None) -> Page[File]:
        """Returns the next files of the tenant, of one purpose or of all."""

        def read(record: Record) -> File | None:
            file = decode_file(record.body)
            return file if purpose in (None, file.purpose) else None

        with reachable():
            return await read_page(self._records, tenant, wanted, read)

    async def delete(self, file_id: str, tenant: str) -> None:
        file = await self.find(file_id, tenant)
        with reachable():
            await self._records.delete(file_id, tenant)
        await self.drop(file.blobs)

    async def drop(self, blobs: Sequence[str]) -> None:
        """Removes blobs now; those that can't be removed go with a sweep. Raises no ApiError."""
        try:
            await self._deadlines.set(blobs, 0.0)
            await self._remove(blobs)
        except StoreError as error:
            log.warning("%d blobs of files stay for a while: %s", len(blobs), error)

    async def content(self, parts: Sequence[Part], start: int = 0) -> AsyncGenerator[bytes, None]:
        """Yields the bytes of a file's parts from number `start` on, in pieces."""
        with reachable():
            for part in parts:
                if start >= part.size_bytes:
                    start -= part.size_bytes
                    continue
                async with contextlib.aclosing(self._blobs.read(part.blob, start)) as pieces:
                    async for piece in pieces:
                        yield piece
                start = 0

    async def sweep(self) -> int:
        """Removes blobs whose time has passed; returns their number. Raises StoreError."""
        names = await self._deadlines.passed(self._clock(), SWEEP_BLOBS)
        await self._remove(names)
        return len(names)

    async def _remove(self, blobs: Sequence[str]) -> None:
        await self._blobs.delete(blobs)
        await self._deadlines.forget(blobs)

    async def _sweep_always(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            try:
                while await self.sweep() == SWEEP_BLOBS:
                    continue
            except StoreError as error:
                log.warning("bytes of expired files stay for a while: %s", error)


def no_such_file(file_id: str, param: str = "id") -> ApiError:
    """Returns OpenAI's error for an unknown file."""
    return ApiError(404, f"No such File object: {file_id[:80]}", param=param)


@contextmanager
def reachable() -> Iterator[None]:
    """Makes an error of a store a 503, and a missing blob a 404."""
    with errors.reachable("files"):
        try:
            yield
        except BlobMissing as error:
            raise ApiError(404, "The bytes of this file are gone.", code="file_gone") from error
