"""Bytes under names, in a folder or an object store, by fsspec.

A blob is written once, in pieces, and is never changed. A blob whose writing broke off may exist;
its name is in no record then.
"""

from __future__ import annotations

import asyncio
import os
import posixpath
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import IO, Any

import fsspec
from fsspec.implementations.local import LocalFileSystem

from millrace.core.errors import ConfigError
from millrace.state.store import StoreError

#: The bytes of one read, and of one write: a piece is in memory at a time.
PIECE_BYTES = 1 << 20


class BlobMissing(StoreError):
    """The store has no blob of this name."""


class Blobs:
    """Blobs below the URL of a folder: a path, or `s3://bucket/folder`, `memory://folder`, ...

    fsspec's calls run on threads. All methods raise StoreError if the store refuses or fails.
    """

    def __init__(self, url: str) -> None:
        """Raises ConfigError for a URL without an installed backend."""
        try:
            self._fs, self._root = fsspec.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(f"files.url is {url!r}; no backend can open it: {error}") from error
        self._is_local = isinstance(self._fs, LocalFileSystem)

    def writer(self, name: str) -> BlobWriter:
        """Returns a context that writes the blob; leaving it by an error removes the blob."""
        return BlobWriter(self, name)

    async def read(self, name: str, start: int = 0) -> AsyncGenerator[bytes, None]:
        """Yields the pieces of the blob from byte `start` on. Raises BlobMissing."""
        file = await self._call(name, self._open, name, start)
        try:
            while piece := await self._call(name, file.read, PIECE_BYTES):
                yield piece
        finally:
            await asyncio.to_thread(file.close)

    async def delete(self, names: Sequence[str]) -> None:
        """Removes blobs; a blob that is not there counts as removed."""
        for name in names:
            try:
                await self._call(name, self._fs.rm_file, self._path(name))
            except BlobMissing:
                continue

    def open_to_write(self, name: str) -> IO[bytes]:
        """Opens a new blob; blocks."""
        path = self._path(name)
        if self._is_local:
            os.makedirs(posixpath.dirname(path), exist_ok=True)
        opened: IO[bytes] = self._fs.open(path, "wb")
        return opened

    def close_written(self, file: IO[bytes]) -> None:
        """Closes a blob so that it survives the host's crash, where this process can say so."""
        if self._is_local:
            file.flush()
            os.fsync(file.fileno())
        file.close()

    def _open(self, name: str, start: int) -> IO[bytes]:
        file: IO[bytes] = self._fs.open(self._path(name), "rb", block_size=PIECE_BYTES)
        if start:
            file.seek(start)
        return file

    def _path(self, name: str) -> str:
        """Returns a path in one of 256 folders: some stores are slow with large folders."""
        return posixpath.join(self._root, name[:2], name)

    async def _call(self, name: str, call: Any, *arguments: object) -> Any:  # noqa: ANN401
        return await call_store(name, call, *arguments)


class BlobWriter:
    """Writes one blob in pieces."""

    def __init__(self, blobs: Blobs, name: str) -> None:
        self._blobs = blobs
        self._name = name
        self._file: IO[bytes] | None = None
        self.size_bytes = 0

    async def __aenter__(self) -> BlobWriter:
        self._file = await call_store(self._name, self._blobs.open_to_write, self._name)
        return self

    async def write(self, piece: bytes) -> None:
        assert self._file is not None, "enter the context first"
        await call_store(self._name, self._file.write, piece)
        self.size_bytes += len(piece)

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._file is not None, "enter the context first"
        if kind is None:
            await call_store(self._name, self._blobs.close_written, self._file)
            return
        await asyncio.to_thread(_discard, self._file)
        await self._blobs.delete([self._name])


def _discard(file: Any) -> None:  # noqa: ANN401 - a file of any backend
    """Closes a file that nobody wants; ends an upload in parts without its end."""
    try:
        file.close()
    except Exception:  # the caller's own error says why
        return


async def call_store(name: str, call: Any, *arguments: object) -> Any:  # noqa: ANN401
    """Runs a blocking call on a thread. Raises BlobMissing and StoreError."""
    try:
        return await asyncio.to_thread(call, *arguments)
    except FileNotFoundError as error:
        raise BlobMissing(f"blob {name}: {error}") from error
    except Exception as error:  # backends raise errors of their own libraries
        raise StoreError(f"blob {name}: {error}") from error
