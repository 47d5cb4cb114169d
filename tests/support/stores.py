"""Real redis-servers for a test, and the users of the services."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import pytest
from redis.asyncio import Redis

from millrace.core.config import StoreConfig
from millrace.local.private_redis import PrivateRedis
from millrace.state.redis.access import RIGHTS, rules_of, user_of
from millrace.state.store import StoreError
from support.deadlines import HANG_S

#: Of every user that a test makes.
PASSWORD = "of-a-test"

T = TypeVar("T")


@asynccontextmanager
async def private_redis(service: str = "") -> AsyncIterator[str]:
    """Yields the URL of a redis-server that lives as long as the block.

    With a `service`, the URL is that of the service's user, who may do no more than it needs.
    """
    with tempfile.TemporaryDirectory(prefix="millrace-") as directory:
        server = PrivateRedis()
        url = await server.start(Path(directory))
        try:
            if service:
                async with Redis.from_url(url) as client:
                    await add_users(client)
            yield as_service(url, service) if service else url
        finally:
            await server.stop()


@asynccontextmanager
async def chosen_redis(request: pytest.FixtureRequest, service: str) -> AsyncIterator[str]:
    """Yields the URL of an empty store with the service's user: of one server, or of a cluster if
    the fixture's parameter is "cluster".
    """
    if request.param == "cluster":
        servers = request.getfixturevalue("cluster")
        servers.empty()
        yield as_service(servers.url, service)
        return
    async with private_redis(service) as url:
        yield url


def patient(url: str, **settings: float | str) -> StoreConfig:
    """Returns the settings of a store whose server may be as slow as the machine."""
    return StoreConfig(**{"url": url, "timeout_s": HANG_S, **settings})


async def add_users(client: Redis) -> None:
    """Makes the user of every service, by a client that may do so."""
    for service in RIGHTS:
        rules = rules_of(service, StoreConfig.key_prefix, PASSWORD)
        await client.execute_command("ACL", "SETUSER", user_of(service, "millrace"), *rules)


def as_service(url: str, service: str) -> str:
    """Returns the URL with the service's user, who was made by `add_users`."""
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{user_of(service, 'millrace')}:{PASSWORD}@{rest}"


async def in_the_end(call: Callable[[], Awaitable[T]]) -> tuple[T, set[str]]:
    """Calls until no StoreError is raised; returns the answer, and what the errors said."""
    said: set[str] = set()
    async with asyncio.timeout(HANG_S):
        while True:
            try:
                return await call(), said
            except StoreError as error:
                said.add(str(error))
                await asyncio.sleep(0.01)
