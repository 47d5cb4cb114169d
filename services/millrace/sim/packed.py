"""Opens files that may be packed by gzip: traces and recordings."""

from __future__ import annotations

import gzip
from io import BufferedReader
from pathlib import Path

_GZIP = b"\x1f\x8b"


def open_packed(path: Path) -> gzip.GzipFile | BufferedReader:
    """Opens a file, plain or gzip, to read its bytes. Raises OSError."""
    with path.open("rb") as probe:
        is_packed = probe.read(len(_GZIP)) == _GZIP
    return gzip.open(path) if is_packed else path.open("rb")
