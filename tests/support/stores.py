"""A real redis-server for a test, and stores on it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from millrace.local.private_redis import PrivateRedis


@asynccontextmanager
async def private_redis() -> AsyncIterator[str]:
    """Yields the URL of a redis-server that lives as long as the block."""
    with tempfile.TemporaryDirectory(prefix="millrace-") as directory:
        server = PrivateRedis()
        url = await server.start(Path(directory))
        try:
            yield url
        finally:
            await server.stop()
