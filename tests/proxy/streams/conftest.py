"""One proxy, or two replicas with the same Redis."""

from __future__ import annotations

from contextlib import AsyncExitStack

import pytest

from millrace.proxy.streams import lives
from support.deadlines import HANG_S
from support.gateway import gateway
from support.stores import private_redis


@pytest.fixture
async def stack(tmp_path):
    async with gateway(tmp_path) as running:
        yield running


@pytest.fixture
async def store_url():
    async with private_redis() as url:
        yield url


@pytest.fixture
async def replicas(tmp_path, store_url):
    """Two proxies with the same Redis, each with a scripted fleet of its own."""
    async with AsyncExitStack() as exits:
        yield [
            await exits.enter_async_context(gateway(tmp_path / name, f"store.url={store_url}"))
            for name in ("a", "b")
        ]


@pytest.fixture
def short_leases(monkeypatch):
    """Owners never renew: their streams are lost at once."""
    monkeypatch.setattr(lives, "LEASE_S", 0.0)
    monkeypatch.setattr(lives, "RENEW_S", HANG_S)
