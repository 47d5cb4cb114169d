"""`millrace decode`: wires a decode instance together."""

from __future__ import annotations

from collections.abc import Callable

from millrace.core.config import Config
from millrace.decode.loop import DecodeRole
from millrace.instance.host import WorkerOptions, serve_worker


async def serve(
    options: WorkerOptions, config: Config, on_ready: Callable[[int], None] | None = None
) -> None:
    """Runs until SIGTERM or SIGINT, then finishes what it has."""
    await serve_worker(options, config, DecodeRole, on_ready, decodes=True)
