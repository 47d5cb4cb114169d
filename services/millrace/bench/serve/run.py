"""Runs the load test of `millrace bench serve` under a progress bar."""

from __future__ import annotations

import asyncio
import signal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from millrace.bench.common.load_test import ServeOptions, run
from millrace.bench.common.report import RequestRecord
from millrace.core.errors import ConfigError
from millrace.sim.workload.workload import Draw, parse_lengths


async def run_with_progress(options: ServeOptions, console: Console) -> list[RequestRecord]:
    """Runs the test under a progress bar; the first Ctrl-C ends it early, with a report."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, stop.set)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[in_flight]} in flight, {task.fields[failed]} failed"),
    )
    with Progress(*columns, console=console, refresh_per_second=4) as progress:
        return await run(options, progress, stop)


def lengths(text: str, option: str, default: str) -> Draw | None:
    """Reads a distribution of lengths. Raises ConfigError that names `option`."""
    return parse_lengths(text or default, option) if text or default else None


def id_range(text: str) -> tuple[int, int] | None:
    """Reads the first and the last id of a range. Raises ConfigError."""
    if not text:
        return None
    low, _, high = text.partition(":")
    if low.isdecimal() and high.isdecimal() and int(low) <= int(high):
        return int(low), int(high)
    raise ConfigError(f"--token-ids {text!r}: write it as LOW:HIGH")
