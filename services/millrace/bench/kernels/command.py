"""The options of `millrace bench kernels`: the kernels' speed. `run.py` measures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from millrace.bench.common.options import DTYPES, option, read_names
from millrace.bench.common.options import command as made

if TYPE_CHECKING:
    from millrace.bench.kernels.case import Sizes

KERNELS = (
    "prefill",
    "decode",
    "ring",
    "merge",
    "rope_write_kv",
    "add_rms_norm",
    "silu_mul",
    "linear",
    "after_norm",
    "after_silu",
    "experts",
    "sample",
)
CHUNKS = "chunks"
NAMES = (*KERNELS, CHUNKS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The measurements. `budget_s`: seconds per case, unless its first calls take longer.

    sizes: the shapes; None: those of `Sizes`.
    """

    names: Sequence[str] = option(
        NAMES, "--only", read=read_names(*NAMES), metavar="NAMES", help=f"Of {', '.join(NAMES)}."
    )
    dtypes: Sequence[str] = option(
        DTYPES, "--dtypes", read=read_names(*DTYPES), help="Comma-separated: float32, bfloat16."
    )
    budget_s: float = option(0.5, "--budget-s", min=0.0, help="Seconds a case.")
    threads: int | None = option(
        None, "--threads", kind=int | None, min=1, help="Default: as many as torch takes."
    )
    sizes: Sizes | None = None
    peak_side: int = 2048
    read_bytes: int = 512 * 2**20
    chunk_rows: tuple[int, int] = (32, 2048)
    chunk_history: int = 65536


command = made(
    Settings,
    "Each kernel's speed on the CPU beside torch's own way and the machine's peaks.",
    plot="Write the shares as a PNG.",
)
