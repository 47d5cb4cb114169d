"""The options of `millrace bench transfer`: KV transfer. `run.py` measures."""

from __future__ import annotations

from dataclasses import dataclass

from millrace.bench.common.options import command as made
from millrace.bench.common.options import option, read_numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """The values of the options."""

    sizes_mib: tuple[int, ...] = option(
        (8, 64, 256),
        "--sizes",
        read=read_numbers(),
        metavar="MIB",
        help="KV sizes in MiB, comma-separated.",
    )
    repeats: int = option(5, "--repeats", min=1, help="Repetitions; medians are reported.")
    in_flight: int = option(4, "--in-flight", min=1, help="Requests of a stream at a time.")
    overlap_mib: int = option(
        64, "--overlap", min=1, metavar="MIB", help="KV size of the overlap test."
    )
    layer_ms: float = option(4.0, "--layer-ms", min=0.01, help="Compute of a layer, milliseconds.")
    threads: int = option(1, "--threads", min=1, help="Compute threads.")


command = made(
    Settings,
    "KV transfer between two processes: rate against bare NIXL writes, and what overlap hides.",
)
