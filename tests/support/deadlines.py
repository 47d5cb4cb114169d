"""Waiting for what must happen, and how long: only a hang takes as long, on the slowest machine.

A timeout of what is tested, which a test wants never to be over, is longer than this.
"""

from __future__ import annotations

import asyncio
from typing import Any

from millrace.instance.tasks import stacks

HANG_S = 120.0


async def eventually(check: Any, timeout_s: float = HANG_S, *, what: str = "") -> None:
    """Waits until `check()` (plain or async) is true; fails after a while with its last value and
    with what all tasks and threads of this process wait for.
    """
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while True:
        value = check()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return
        if loop.time() >= deadline_s:
            print(stacks())
            raise AssertionError(f"{what or 'it'}: still {value!r} after {timeout_s:g} s")
        await asyncio.sleep(0.01)
