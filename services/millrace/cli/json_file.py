"""What commands write where `--json PATH` says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from millrace.core.errors import MillraceError


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Raises MillraceError for a bad path."""
    try:
        path.write_bytes(orjson.dumps(document, option=orjson.OPT_INDENT_2) + b"\n")
    except OSError as error:
        raise MillraceError(f"--json {path}: {error}") from error
