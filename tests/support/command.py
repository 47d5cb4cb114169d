"""The `millrace` command in a process of its own, as a user types it."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping

from support.deadlines import HANG_S


async def start(
    *arguments: str, environment: Mapping[str, str] | None = None
) -> asyncio.subprocess.Process:
    """`environment` is added to that of the tests; what is printed comes in one stream."""
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "millrace", *arguments),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "COLUMNS": "120", "PYTHONUNBUFFERED": "1", **(environment or {})},
    )


async def millrace(
    *arguments: str, environment: Mapping[str, str] | None = None, timeout_s: float = HANG_S
) -> tuple[int | None, str]:
    """Exit status and output of a command that ends by itself."""
    process = await start(*arguments, environment=environment)
    output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    return process.returncode, output.decode()
