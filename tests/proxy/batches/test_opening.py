"""Gateways that share a Redis: each has its own files and batches."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from millrace.core.config import Config, load_config
from millrace.proxy.batches.opening import open_batches, open_files
from millrace.proxy.batches.service import Batches
from millrace.proxy.errors import ApiError
from millrace.proxy.files.store import Files
from millrace.proxy.metrics import BatchMetrics
from millrace.telemetry.metrics import Registry
from support.batches import CHAT, Endpoint, create, ended, lines, until, upload
from support.stores import private_redis


@asynccontextmanager
async def proxy(config: Config, owner: str) -> AsyncIterator[tuple[Files, Batches, Endpoint]]:
    """Files and batches as a proxy opens them, and what its endpoint is asked."""
    files, endpoint = open_files(config), Endpoint()
    batches = open_batches(
        config,
        files,
        owner=owner,
        is_ready=lambda _: True,
        check_model=lambda _: None,
        metrics=BatchMetrics(Registry()),
    )
    batches.serve(endpoint.ask)
    try:
        yield files, batches, endpoint
    finally:
        await batches.close()
        await files.close()


async def test_only_proxies_of_the_group_know_of_a_batch(tmp_path: Path) -> None:
    async with private_redis() as url:

        def settings(group: str) -> Config:
            return load_config(
                overrides=[
                    *(f"store.url={url}", f"files.url={tmp_path / group}"),
                    f"files.group={group}",
                ]
            )

        async with (
            proxy(settings("one"), "one-a") as (files, first, _),
            proxy(settings("one"), "one-b") as (_, second, endpoint),
            proxy(settings("two"), "two-a") as (others, other, idle),
        ):
            file_id = await upload(files, lines(3))
            made = await create(first, file_id)
            with pytest.raises(ApiError, match=r"^No (batch found|such File)"):
                await other.find(made.id, "acme")
            with pytest.raises(ApiError, match=r"^No (batch found|such File)"):
                await others.find(file_id, "acme")
            other.start()
            second.start()
            found = await until(second, made.id, ended)
            assert (found.endpoint, found.status, found.completed) == (CHAT, "completed", 3)
            assert sorted(endpoint.asked) == ["r0", "r1", "r2"]
            assert idle.asked == []
