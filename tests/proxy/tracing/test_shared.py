"""Waterfalls at replicas of the proxy that did not serve the request."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis.asyncio import Redis

from millrace.cli.commands.chat import GatewayError
from millrace.cli.commands.trace import read_gateway
from millrace.core.config import Config, StoreConfig, TenantConfig, load_config
from millrace.core.span import Span
from millrace.proxy.errors import ApiError
from millrace.proxy.streams.latest_records import LatestRecords
from millrace.proxy.tracing.shared import SharedWaterfalls
from millrace.proxy.tracing.stored_texts import MOST_BYTES, SMALL_BYTES, StoredTexts
from millrace.state.memory_store import MemoryStore
from millrace.state.streams import MemoryStreams
from millrace.state.waterfalls import RedisWaterfalls
from support.deadlines import HANG_S, eventually
from support.gateway import MODEL, Script, Stack, gateway
from support.stores import private_redis

CHAT = "/v1/chat/completions"
BODY = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}


@asynccontextmanager
async def two_replicas(folder: Path, config: Config | None = None) -> AsyncIterator[list[Stack]]:
    """Two proxies with one Redis. A test may have stopped the first one, on `exits`."""
    config = config or load_config()
    async with AsyncExitStack() as exits:
        url = await exits.enter_async_context(private_redis())
        config = replace(config, store=replace(config.store, url=url))
        yield [
            await exits.enter_async_context(gateway(folder / name, config=config))
            for name in ("first", "second")
        ]


async def trace(stack: Stack, path: str, **headers: str) -> dict[str, Any]:
    """Returns the waterfall at a replica that did not serve the request, once it has come."""
    answers: list[httpx.Response] = []

    async def found() -> bool:
        answers.append(await stack.http.get(path, headers=headers))
        assert answers[-1].status_code in (200, 404, 409)
        return answers[-1].status_code == 200

    await eventually(found)
    return answers[-1].json()


async def test_a_replica_knows_what_another_has_served(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as (first, second):
        first.fleet.script = Script(spans=[Span(name="c", instance_id="p", start_s=0.0, end_s=0.1)])
        headers = {"x-millrace-request-id": "mine"}
        answer = (await first.http.post(CHAT, json=BODY, headers=headers)).json()
        own = (await first.http.get("/v1/requests/mine/trace")).json()
        for name in ("mine", answer["id"]):
            assert await trace(second, f"/v1/requests/{name}/trace") == own
        assert await trace(second, f"/admin/requests/{answer['id']}.1/trace") == own
        [drawn] = await asyncio.to_thread(read_gateway, second.url, "", "mine")
        assert "c" in [span.name for span in drawn.spans]
        two = {"model": MODEL, "prompt": ["one", "two"]}
        answer = (await first.http.post("/v1/completions", json=two)).json()
        found = await trace(second, f"/v1/requests/{answer['id']}/trace")
        assert found["more"][0]["request_id"] == f"{answer['id']}-1"
        refused = await second.http.get("/v1/requests/nothing/trace")
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "request_not_found")


async def test_waterfalls_outlive_their_replica(tmp_path: Path) -> None:
    async with private_redis() as url:
        async with gateway(tmp_path, f"store.url={url}") as first:
            answer = (await first.http.post(CHAT, json=BODY)).json()
            own = (await first.http.get(f"/v1/requests/{answer['id']}/trace")).json()
        async with gateway(tmp_path, f"store.url={url}") as second:
            assert (await second.http.get(f"/v1/requests/{answer['id']}/trace")).json() == own


async def test_an_open_request_is_known_elsewhere_but_has_no_waterfall(tmp_path: Path) -> None:
    async with two_replicas(tmp_path) as (first, second):
        first.fleet.script = Script(hold=(hold := asyncio.Event()))
        headers = {"x-millrace-request-id": "mine"}
        asking = asyncio.create_task(first.http.post(CHAT, json=BODY, headers=headers))
        await asyncio.wait_for(first.fleet.submitted.wait(), HANG_S)
        refused = await second.http.get("/v1/requests/mine/trace")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "request_open")
        with pytest.raises(GatewayError, match="open at another replica"):
            await asyncio.to_thread(read_gateway, second.url, "", "mine")
        assert (await first.http.get("/v1/requests/mine/trace")).status_code == 200
        hold.set()
        await asking
        assert (await trace(second, "/v1/requests/mine/trace"))["ttft_ms"] > 0.0


@pytest.mark.parametrize("choices", [1, 2])
async def test_a_migrated_request_is_open_elsewhere(tmp_path: Path, choices: int) -> None:
    """The store has it under another id: of the request's next incarnation, or of its choices'."""
    async with two_replicas(tmp_path) as (first, second):
        hold = asyncio.Event()
        first.fleet.script = Script(hold=hold, hold_after=2, others=("another",))
        headers, body = {"x-millrace-request-id": "mine"}, {**BODY, "n": choices, "stream": True}
        asking = asyncio.create_task(first.http.post(CHAT, json=body, headers=headers))
        await first.begun()
        (before,) = first.fleet.specs
        first.fleet.move(before)
        await eventually(lambda: len(first.fleet.specs) == 1 + choices)

        async def migrated() -> bool:
            return await first.state_of(before.request_id) == "cancelled"

        await eventually(migrated)
        for name in ("mine", before.request_id):
            refused = await second.http.get(f"/v1/requests/{name}/trace")
            assert (refused.status_code, refused.json()["error"]["code"]) == (409, "request_open")
            report = await second.http.get(f"/v1/requests/{name}")
            assert report.json()["state"] not in ("cancelled", "finished")
        hold.set()
        await asking
        found = await trace(second, "/v1/requests/mine/trace")
        assert "moved" in [span["name"] for span in found["spans"]]


async def test_a_tenant_sees_no_request_of_another(tmp_path: Path) -> None:
    tenants = {
        name: TenantConfig(key_sha256=(sha256(name.encode()).hexdigest(),))
        for name in ("ann", "bob")
    }
    ann, bob = ({"authorization": f"Bearer {name}"} for name in ("ann", "bob"))
    config = replace(load_config(), tenants=tenants)
    async with two_replicas(tmp_path, config) as (first, second):
        first.fleet.script = Script(hold=(hold := asyncio.Event()))
        headers = {"x-millrace-request-id": "mine", **ann}
        asking = asyncio.create_task(first.http.post(CHAT, json=BODY, headers=headers))
        await asyncio.wait_for(first.fleet.submitted.wait(), HANG_S)
        path = f"/v1/requests/{first.fleet.specs[0].request_id}/trace"
        assert (await second.http.get(path, headers=ann)).status_code == 409
        assert (await second.http.get(path, headers=bob)).status_code == 404
        hold.set()
        await asking
        await trace(second, path, **ann)
        assert (await second.http.get(path, headers=bob)).status_code == 404


async def test_nothing_is_written_where_no_waterfall_is_kept(tmp_path: Path) -> None:
    async with private_redis() as url, Redis.from_url(url) as client:
        settings = (f"store.url={url}", "telemetry.waterfall_bytes=0")
        async with gateway(tmp_path, *settings) as stack:
            await stack.http.post(CHAT, json=BODY)
        assert await client.keys("*:waterfall:*") == []


async def test_large_waterfalls_are_compressed_and_huge_ones_left_out(tmp_path: Path) -> None:
    def bars(count: int, name: str = "chunk") -> list[Span]:
        places = range(count)
        return [Span(name=f"{name} {i}", instance_id="p", start_s=i, end_s=i) for i in places]

    async with private_redis() as url, Redis.from_url(url) as client:
        async with gateway(tmp_path, f"store.url={url}") as stack:
            ids = []
            for spans in (
                bars(1),
                bars(400),
                bars(1, random.Random(7).randbytes(2 * MOST_BYTES).hex()),
            ):
                stack.fleet.script = Script(spans=spans)
                ids.append((await stack.http.post(CHAT, json=BODY)).json()["id"])
        sizes = [await client.strlen(f"millrace:waterfall:{one}") for one in ids]
        assert 0 < sizes[0] < SMALL_BYTES
        assert SMALL_BYTES < sizes[1] < 400 * 20
        assert sizes[2] == 0
        async with gateway(tmp_path, f"store.url={url}") as stack:
            found = (await stack.http.get(f"/v1/requests/{ids[1]}/trace")).json()
            assert sum(bar["name"].startswith("chunk") for bar in found["spans"]) == 400


async def test_a_store_out_of_reach_is_said(caplog: pytest.LogCaptureFixture) -> None:
    away = RedisWaterfalls(StoreConfig(url="redis://127.0.0.1:1"), "waterfall", 60.0)
    records = LatestRecords(MemoryStore(StoreConfig()), MemoryStreams())
    waterfalls = SharedWaterfalls(StoredTexts(away), records.find)
    with pytest.raises(ApiError, match="does not answer"):
        await waterfalls.find(["a"], None)
    waterfalls.add("a", b"[]")
    await waterfalls.close(HANG_S)
    assert "1 waterfalls were not written" in caplog.text
