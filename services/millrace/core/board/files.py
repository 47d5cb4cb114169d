"""Writes and reads files of a board: JSON lines, compressed where the name ends in .gz."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Final, cast

from millrace.core.board.events import BoardError, Head, head_line, read_line
from millrace.core.errors import reason_of

#: The last bytes of a name that stand for gzip.
_PACKED: Final = ".gz"


class BoardFile:
    """A file that takes lines until `close`; also a context manager."""

    def __init__(self, path: Path, head: Head) -> None:
        """Opens the file and writes the head. Raises BoardError if the path can't be written."""
        self._path = path
        try:
            self._file = _to_write(path)
            self.write(head_line(head))
        except OSError as error:
            raise BoardError(f"{path}: {reason_of(error)}") from error

    def __enter__(self) -> BoardFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, line: Mapping[str, Any]) -> None:
        """Writes one line. Raises BoardError, for example when the disk is full."""
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            raise BoardError(f"{self._path}: {reason_of(error)}") from error

    def close(self) -> None:
        """Writes the rest. Raises BoardError."""
        try:
            self._file.close()
        except OSError as error:
            raise BoardError(f"{self._path}: {reason_of(error)}") from error


def read_text(path: Path) -> str:
    """Returns the text of a file. Raises BoardError for a file that can't be read."""
    try:
        with _to_read(path) as file:
            return file.read()
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise BoardError(f"{path}: {reason_of(error)}") from error


def read_objects(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the objects of a file's lines; a last line that is not whole is left out.

    Raises BoardError naming the line.
    """
    lines = read_text(path).splitlines()
    for number, line in enumerate(lines, 1):
        try:
            found = json.loads(line)
        except ValueError as error:
            if number == len(lines) > 1:
                return  # its writer was stopped while it wrote
            raise BoardError(f"{path}, line {number}: no JSON: {error}") from error
        if not isinstance(found, dict):
            raise BoardError(f"{path}, line {number}: no JSON object")
        yield found


def check_head(path: Path) -> None:
    """Raises BoardError unless the file begins with a head of this format."""
    first = next(read_objects(path), {})
    if "millrace_board" not in first:
        raise BoardError(f"{path}: its first line names no millrace_board")
    read_line(first)


def _to_write(path: Path) -> IO[str]:
    return io.TextIOWrapper(_Packed(path)) if path.suffix == _PACKED else path.open("w")


class _Packed(gzip.GzipFile):
    """Writes neither a name nor a time into the file: equal lines give equal bytes."""

    def __init__(self, path: Path) -> None:
        self._raw = path.open("wb")
        super().__init__("", "wb", fileobj=self._raw, mtime=0)

    def close(self) -> None:
        try:
            super().close()
        finally:
            self._raw.close()


def _to_read(path: Path) -> IO[str]:
    open_file = gzip.open if path.suffix == _PACKED else open
    return cast(IO[str], open_file(path, "rt"))
