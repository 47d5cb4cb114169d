"""Options and arguments that name files: typer checks the paths before a command begins.

typer.Option("--trace", metavar="FILE", help="...", **READ)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import typer


def _check_folder(path: Path | None) -> Path | None:
    if path is not None and not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"There is no folder '{path.parent}'.")
    return path


#: The files that `sim.workload.traces` reads, for the help of an option.
TRACE_FORMATS: Final = (
    "Azure CSV, Mooncake or Qwen JSONL, a lengths CSV, or a recording of --record; .gz or plain."
)
#: Of a file that the command reads.
READ: Final[dict[str, Any]] = {"exists": True, "dir_okay": False, "readable": True}
#: Of a file that the command writes: its folder must exist.
WRITE: Final[dict[str, Any]] = {"dir_okay": False, "writable": True, "callback": _check_folder}
