"""Python runs this at the start of a process that has this folder on PYTHONPATH: services then get
late event loops in the place of uvloop's. `make test-late-faults` does harm to such services.
"""

import asyncio
import os
from collections.abc import Coroutine
from typing import Any

import uvloop

from support.late_loop import DRAW, LateLoop


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """Stands for `uvloop.run`."""
    with asyncio.Runner(loop_factory=LateLoop) as runner:
        return runner.run(work)


uvloop.run = run  # type: ignore[assignment]
uvloop.new_event_loop = LateLoop  # type: ignore[assignment]
os.register_at_fork(after_in_child=DRAW.seed)  # services are forked: each draws for itself
