"""Runs `millrace colocated`: an instance that prefills and decodes, as a pair or mixed."""

from __future__ import annotations

from collections.abc import Callable

from millrace.colocated.mixed import serve as serve_mixed
from millrace.colocated.pair import serve as serve_pair
from millrace.core.config import Config
from millrace.instance.host import WorkerOptions

#: The serve function by the value of `--role`.
SERVE = {"pair": serve_pair, "mixed": serve_mixed}


async def serve(
    options: WorkerOptions,
    config: Config,
    on_ready: Callable[[int], None] | None = None,
    *,
    role: str = "pair",
) -> None:
    """Serves until SIGTERM, SIGINT or SIGHUP, then finishes its requests."""
    await SERVE[role](options, config, on_ready)
