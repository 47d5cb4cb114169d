"""Output of commands that clean up after themselves, which outlasts its terminal."""

from __future__ import annotations

import errno
import io
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def lasting(stream: TextIO) -> TextIO:
    """Returns a stream that writes where `stream` writes. If that is a terminal and is closed, what
    is written is dropped: SIGHUP, which comes at about the same time, ends the command.
    """
    if not stream.isatty():
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(_Terminal(stream.fileno(), "w", closefd=False)),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=True,
    )


class _Terminal(io.FileIO):
    def write(self, data: ReadableBuffer, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno != errno.EIO:  # what Linux says of a closed terminal
                raise
            return memoryview(data).nbytes
