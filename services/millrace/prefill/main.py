"""Runs `millrace prefill`: builds a prefill instance and serves."""

from __future__ import annotations

from collections.abc import Callable

from millrace.core.config import Config
from millrace.instance.host import WorkerOptions, serve_worker
from millrace.prefill.loop import PrefillRole


async def serve(
    options: WorkerOptions, config: Config, on_ready: Callable[[int], None] | None = None
) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP, then finishes its requests."""
    await serve_worker(options, config, PrefillRole, on_ready)
