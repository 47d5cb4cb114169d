"""`millrace colocated`: wires an instance that does both, in the role that it is given."""

from __future__ import annotations

from collections.abc import Callable

from millrace.colocated import mixed, pair
from millrace.core.config import Config
from millrace.worker.host import WorkerOptions

#: By the name of `--role`.
SERVE = {"pair": pair.serve, "mixed": mixed.serve}


async def serve(
    options: WorkerOptions,
    config: Config,
    on_ready: Callable[[int], None] | None = None,
    *,
    role: str = "pair",
) -> None:
    """Runs until SIGTERM or SIGINT, then finishes what it has."""
    await SERVE[role](options, config, on_ready)
