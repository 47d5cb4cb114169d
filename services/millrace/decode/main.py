"""Runs `millrace decode`: builds a decode instance and serves."""

from __future__ import annotations

from collections.abc import Callable

from millrace.core.config import Config
from millrace.decode.loop import DecodeRole
from millrace.instance.host import WorkerOptions, serve_worker


async def serve(
    options: WorkerOptions, config: Config, on_ready: Callable[[int], None] | None = None
) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP, then finishes its requests."""
    await serve_worker(options, config, DecodeRole, on_ready, decodes=True)
