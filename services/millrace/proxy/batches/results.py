"""Gathers results until they are written as parts of the output file and of the error file."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from millrace.proxy.batches.batch import Usage
from millrace.proxy.batches.lines import Result
from millrace.proxy.batches.progress import joined, tail_to_merge
from millrace.proxy.files.objects import Part
from millrace.proxy.files.store import Files

#: Results of this many bytes are written at once.
FULL_BYTES = 1 << 20


class Results:
    """Results that are in no part yet."""

    def __init__(self) -> None:
        self._rows: list[Result] = []
        self._bytes = 0

    def add(self, result: Result) -> None:
        self._rows.append(result)
        self._bytes += len(result.text)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def full(self) -> bool:
        return self._bytes >= FULL_BYTES

    @property
    def usage(self) -> Usage:
        return sum((row.usage for row in self._rows), Usage())

    def texts(self, *, ok: bool) -> list[bytes]:
        """Returns the lines of the output file, or those of the error file."""
        return [row.text for row in self._rows if row.ok is ok]


async def with_part(
    files: Files, parts: Sequence[Part], texts: Sequence[bytes], lifetime_s: float
) -> tuple[list[Part], list[str]]:
    """Writes lines as the next part, merged with small parts before it.

    Returns all parts, and the blobs of merged parts: they are needed until the parts are recorded.
    """
    if not texts:
        return list(parts), []
    data = joined(texts)
    kept = [*parts, Part(blob="", size_bytes=len(data))]
    merged = kept[len(kept) - tail_to_merge(kept) : -1] if tail_to_merge(kept) else []
    kept = kept[: len(kept) - 1 - len(merged)]
    async with files.blob(lifetime_s) as (blob, writer):
        async with contextlib.aclosing(files.content(merged)) as pieces:
            async for piece in pieces:
                await writer.write(piece)
        await writer.write(data)
    size_bytes = sum(part.size_bytes for part in merged) + len(data)
    return [*kept, Part(blob=blob, size_bytes=size_bytes)], [part.blob for part in merged]
