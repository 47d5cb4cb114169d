"""A KVP worker alone: the shards that it accepts, and streams as leases."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from millrace.core.config import TelemetryConfig
from millrace.core.errors import TransferError
from millrace.core.incarnation import Incarnation
from millrace.core.kv.kvp_hold import AttachAsk, HoldAsk
from millrace.instance.role import WorkerContext
from millrace.instance.shards.shard_host import MAX_ROWS
from millrace.kvp.role import KvpRole
from millrace.state.memory_store import MemoryStore
from millrace.telemetry.tracing.files import read_trace
from millrace.telemetry.tracing.tracer import NO_TRACER, Tracer, open_tracer
from millrace.transfer.transport.regions import Memory
from millrace.wire.clients.kvp_peer import Attachment, GrpcKvpPeer, KvpPeers
from support.deadlines import HANG_S, eventually
from support.memory_transport import MemoryHub, MemoryTransport
from support.worker_roles import LiveRole, config, live_roles

OWNER = Incarnation("decode-0", 3)
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"


def kvp_role(context: WorkerContext) -> KvpRole:
    return KvpRole(context, context.engine)


class Scene:
    """A KVP worker, and a KV owner whose memory is never written to."""

    def __init__(self, worker: LiveRole, peer: GrpcKvpPeer, transport: MemoryTransport) -> None:
        self.worker = worker
        self.peer = peer
        self.attach_ask = AttachAsk(
            owner=OWNER,
            worker=worker.incarnation,
            layout=worker.engine.layout,
            max_rows=MAX_ROWS,
            agent_metadata=transport.metadata(),
            region=0,
            offset=0,
        )
        self.hold_ask = HoldAsk(
            request_id="r",
            attempt=1,
            owner=OWNER,
            worker=self.attach_ask.worker,
            layout=worker.engine.layout,
            start_token=32,
            end_token=100,
            prompt_tokens=20,
        )

    async def attach(self, **changes: Any) -> Attachment:
        return await self.peer.attach(replace(self.attach_ask, **changes), timeout_s=HANG_S)

    async def hold(self, **changes: Any) -> Any:
        return await self.peer.hold(replace(self.hold_ask, **changes), timeout_s=HANG_S)

    @property
    def used_pages(self) -> int:
        return self.worker.engine.pool.used_pages


@asynccontextmanager
async def _scene(tracer: Tracer = NO_TRACER) -> AsyncIterator[Scene]:
    settings, hub, peers = config(), MemoryHub(), KvpPeers()
    store = MemoryStore(settings.store)
    worker = LiveRole(kvp_role, settings, name="kvp-0", hub=hub, store=store, tracer=tracer)
    owner = MemoryTransport("decode-0-3", hub)
    memory = np.zeros(1 << 20, dtype=np.uint8)
    owner.register(Memory.of_array(memory))
    async with live_roles(worker):
        try:
            yield Scene(worker, peers.to(worker.address), owner)
        finally:
            await peers.close()
            owner.close()


@pytest_asyncio.fixture
async def scene() -> AsyncIterator[Scene]:
    async with _scene() as made:
        yield made


async def test_a_shard_lasts_as_long_as_its_stream(scene: Scene) -> None:
    attachment = await scene.attach()
    shard = await scene.hold()
    await shard.landed()  # it begins after the prompt
    assert scene.used_pages == -(-68 // scene.worker.engine.layout.page_tokens)
    assert scene.worker.role.counts() == (1, 0)
    shard.close()
    await scene.worker.said("request_released", "r")
    assert scene.used_pages == 0
    again = await scene.hold()
    assert again.number != shard.number
    attachment.close()


async def test_a_shard_is_a_span_of_its_requests_trace(tmp_path: Path) -> None:
    tracer = open_tracer(TelemetryConfig(trace_folder=str(tmp_path)), "kvp", "kvp-0")
    traceparent = f"00-{TRACE_ID}-00f067aa0ba902b7-01"
    async with _scene(tracer) as scene:
        attachment = await scene.attach()
        shard = await scene.hold(traceparent=traceparent, arrival_unix_s=time.time())
        shard.close()
        await scene.worker.said("request_released", "r")
        attachment.close()
    tracer.close()
    (span,) = read_trace(tmp_path, TRACE_ID)
    assert (span.name, span.service, span.parent_id) == ("shard", "kvp", "00f067aa0ba902b7")
    assert span.attributes["millrace.end_token"] == 100


async def test_all_an_owner_has_goes_with_its_place(scene: Scene) -> None:
    attachment = await scene.attach()
    for name in ("a", "b"):
        await scene.hold(request_id=name)
    attachment.close()
    for name in ("a", "b"):
        await scene.worker.said("request_released", name)
    await eventually(lambda: not scene.worker.role.counts()[0])
    with pytest.raises(TransferError, match="is not attached"):
        await scene.hold()
    (await scene.attach()).close()


async def test_what_is_not_meant_or_does_not_fit_is_refused(scene: Scene) -> None:
    other_incarnation = Incarnation("kvp-0", 1)
    other_model = replace(scene.worker.engine.layout, model_hash="another")
    for changes, why in (
        ({"worker": other_incarnation}, "stale receiver"),
        ({"layout": other_model}, "model_hash differs"),
        ({"max_rows": 7}, "is 7; it must be 128"),
    ):
        with pytest.raises(TransferError, match=why):
            await scene.attach(**changes)
    attachment = await scene.attach()
    with pytest.raises(TransferError, match="KV pages wanted"):
        await scene.hold(end_token=10_000_000)
    held = await scene.hold()
    with pytest.raises(TransferError, match="has a shard here already"):
        await scene.hold()
    held.close()
    attachment.close()
    await scene.worker.said("request_released", "r")


async def test_a_worker_that_leaves_tells_the_owners(scene: Scene) -> None:
    attachment = await scene.attach()
    held = await scene.hold()
    await held.landed()
    await scene.worker.role.drop_all("it is shutting down")
    assert "it is shutting down" in await held.lost()
    assert scene.used_pages == 0
    attachment.close()
