"""States reach the store in batches; an unreachable store delays no request."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from urllib.parse import unquote, urlsplit

import numpy as np

from millrace.core.config import StoreConfig
from millrace.core.request import RequestState
from millrace.core.scheduler.effects import Record
from millrace.scheduler.recorder import Recorder
from millrace.state.open import open_store
from support.deadlines import HANG_S
from support.live_stack import eventually
from support.stores import private_redis

PROMPT = np.array([1, 2, 3], dtype=np.int32)


def record(request_id: str, state: RequestState, decode_id: str | None = "d0") -> Record:
    return Record(request_id=request_id, state=state, decode_id=decode_id)


@asynccontextmanager
async def recording(store, **limits):
    recorder = Recorder(store, **limits)
    task = asyncio.create_task(recorder.run())
    try:
        yield recorder
        assert not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_last_state_of_each_request_is_written():
    async with private_redis() as url:
        store = open_store(StoreConfig(url=url))
        async with recording(store) as recorder:
            for name in ("a", "b"):
                await store.create(name, spec=b"s", prompt_ids=PROMPT)
                recorder.put(record(name, RequestState.QUEUED))
                recorder.put(record(name, RequestState.PREFILLING))
            recorder.put(record("b", RequestState.FINISHED))
            recorder.put(record("gone", RequestState.DECODING))
            await asyncio.wait_for(recorder.flushed(), HANG_S)
            a, b = await store.get("a"), await store.get("b")
            assert (a.state, a.decode_id) == ("prefilling", "d0")
            assert b.state == "finished"
            assert await store.get("gone") is None
        await store.close()


async def test_an_outage_loses_no_state_and_newer_ones_win(tmp_path):
    async with private_redis() as url:
        near = open_store(StoreConfig(url=url))
        for name in ("a", "b"):
            await near.create(name, spec=b"s", prompt_ids=PROMPT)
        road = tmp_path / "road"  # to the server; at first it leads nowhere
        store = open_store(StoreConfig(url=f"unix://{road}"))
        async with recording(store) as recorder:
            recorder.put(record("a", RequestState.QUEUED, "d1"))
            recorder.put(record("b", RequestState.PREFILLING, "d1"))
            await asyncio.sleep(0.05)
            recorder.put(record("a", RequestState.FINISHED))
            assert (await near.get("b")).state == "queued"
            road.symlink_to(unquote(urlsplit(url).path))
            await asyncio.wait_for(recorder.flushed(), HANG_S)
            assert (await near.get("a")).state == "finished"
            b = await near.get("b")
            assert (b.state, b.decode_id) == ("prefilling", "d1")
            assert recorder.dropped == 0
        await store.close()
        await near.close()


async def test_a_full_buffer_drops_the_oldest_and_counts(tmp_path):
    store = open_store(StoreConfig(url=f"unix://{tmp_path}/nobody.sock"))
    async with recording(store, limit=2) as recorder:
        for index in range(5):
            recorder.put(record(f"r{index}", RequestState.QUEUED))
            assert recorder.buffered <= 2
        assert recorder.dropped == 3
        await asyncio.sleep(0.02)  # taken out to be written, and the store is not there
        for index in range(5, 7):
            recorder.put(record(f"r{index}", RequestState.QUEUED))
        await eventually(lambda: recorder.dropped == 5)
        assert recorder.dropped == 5 and recorder.buffered <= 2
    await store.close()
