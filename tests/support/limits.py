"""Proxies whose tenant acme has limits, alone or two on one Redis, and what its limits leave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from support.deadlines import HANG_S
from support.gateway import MODEL, Stack, gateway
from support.tenants import bearer, config_with, tenant_toml

KEY = bearer("sk-acme")
LEFT = "x-ratelimit-remaining-"


@asynccontextmanager
async def limited(folder: Path, *settings: str, **limits: int) -> AsyncIterator[Stack]:
    """Yields a proxy; acme has these limits, another tenant, with the key sk-free, none."""
    tables = tenant_toml("acme", "sk-acme", **limits) + tenant_toml("free", "sk-free")
    config = config_with(folder / "settings", tables, *settings)
    async with gateway(folder / "model", config=config) as stack:
        yield stack


@asynccontextmanager
async def two_limited(
    folder: Path, store_url: str, **limits: int
) -> AsyncIterator[tuple[Stack, Stack]]:
    """Yields two such proxies that share the Redis at `store_url`."""
    store = f"store.url={store_url}"
    async with (
        limited(folder / "a", store, **limits) as one,
        limited(folder / "b", store, **limits) as other,
    ):
        yield one, other


async def left(stack: Stack, kind: str) -> int:
    """Returns what acme's limit leaves, by the answer to a wrong request, which does not count."""
    sent = await stack.http.post("/v1/chat/completions", json={"model": MODEL}, headers=KEY)
    assert sent.status_code == 400
    return int(sent.headers[LEFT + kind])


async def until_left(stack: Stack, kind: str, wanted: int) -> None:
    """Returns once the correction of an answer, for which nobody waits, is made."""
    seen = -1
    try:
        async with asyncio.timeout(HANG_S):
            while seen != wanted:
                seen = await left(stack, kind)
    except TimeoutError:
        raise AssertionError(f"{seen} {kind} are left, not {wanted}") from None
