"""Blobs in a folder and in fsspec's own memory: written once, read from anywhere, removed."""

from __future__ import annotations

from pathlib import Path

import pytest

from millrace.core.errors import ConfigError
from millrace.state.blobs import PIECE_BYTES, BlobMissing, Blobs
from millrace.state.store import StoreError


@pytest.fixture(params=["folder", "memory"])
def blobs(request: pytest.FixtureRequest, tmp_path: Path) -> Blobs:
    return Blobs(str(tmp_path) if request.param == "folder" else f"memory://{tmp_path.name}")


async def content(blobs: Blobs, name: str, start: int = 0) -> list[bytes]:
    return [piece async for piece in blobs.read(name, start)]


async def test_a_blob_comes_back_in_pieces_from_any_byte(blobs: Blobs) -> None:
    async with blobs.writer("abc") as writer:
        await writer.write(b"x" * PIECE_BYTES)
        await writer.write(b"yz")
    assert writer.size_bytes == PIECE_BYTES + 2
    assert [len(piece) for piece in await content(blobs, "abc")] == [PIECE_BYTES, 2]
    assert await content(blobs, "abc", PIECE_BYTES + 1) == [b"z"]
    assert await content(blobs, "abc", PIECE_BYTES + 2) == []


async def test_a_removed_blob_is_missing_and_may_be_removed_again(blobs: Blobs) -> None:
    async with blobs.writer("abc") as writer:
        await writer.write(b"x")
    await blobs.delete(["abc", "never"])
    await blobs.delete(["abc"])
    with pytest.raises(BlobMissing):
        await content(blobs, "abc")


async def test_an_error_while_it_is_written_removes_the_blob(blobs: Blobs) -> None:
    with pytest.raises(RuntimeError, match="client left"):
        async with blobs.writer("abc") as writer:
            await writer.write(b"x")
            raise RuntimeError("client left")
    with pytest.raises(BlobMissing):
        await content(blobs, "abc")


async def test_errors_of_the_backend_are_errors_of_the_store(tmp_path: Path) -> None:
    (tmp_path / "ab").write_text("a file where a folder should be")
    with pytest.raises(StoreError, match="blob abc"):
        async with Blobs(str(tmp_path)).writer("abc"):
            pass


def test_a_url_without_a_backend_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"files\.url is 'nonesuch://x'"):
        Blobs("nonesuch://x")
