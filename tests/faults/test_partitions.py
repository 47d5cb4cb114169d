"""The network between the services and the store, or the scheduler, breaks and heals.

Relays stand in for the network: all services reach the store through one, and the scheduler through
another, whose address it advertises. A relay stalls (connections stay open and silent, as behind a
switch that died), or cuts (connections end and new ones are refused). The promise is that of
`test_matrix.py`. KV goes between the processes of one machine by shared memory, which no partition
reaches.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import pytest
import pytest_asyncio

from support import fault_scene
from support.fault_scene import Scene, Victim, endure, signal_to
from support.fault_traffic import scene_of
from support.live_stack import eventually
from support.redis_servers import HOST, PRIMARY, redis_server
from support.relay import Relay, relay

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

PHASES = {
    "queued": ("long prompt", fault_scene.queued),
    "mid-prefill": ("long prompt", fault_scene.mid_prefill),
    "mid-transfer": ("long prompt", fault_scene.mid_transfer),
    "mid-decode": ("long answer", fault_scene.mid_decode),
    "mid-tool-call": ("tool call", fault_scene.mid_tool_call),
}
Network = dict[str, Relay]  # by the service behind them


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def network(tmp_path_factory) -> AsyncIterator[tuple[Scene, Network]]:
    """A stack whose services reach the store, and its only scheduler, through relays."""
    folder = tmp_path_factory.mktemp("partitions") / "model"
    async with redis_server(PRIMARY) as store, relay(HOST, PRIMARY) as to_store:
        pid = (await store.info("server"))["process_id"]
        url = f"redis://127.0.0.1:{to_store.port}"
        layout = {"prefill": 2, "decode": 2, "schedulers": 1, "redis_url": url, "store_pid": pid}
        async with scene_of(folder, **layout) as scene:
            address = scene.stack.scheduler_address
            async with relay("127.0.0.1", int(address.rpartition(":")[2])) as to_scheduler:
                await reach_by(scene, address, f"127.0.0.1:{to_scheduler.port}")
                yield scene, {"store": to_store, "scheduler": to_scheduler}


async def reach_by(scene: Scene, address: str, advertised: str) -> None:
    """Starts all services again, with another address of the scheduler."""
    services = scene.stack.services
    for service in services.values():
        service.arguments = [advertised if a == address else a for a in service.arguments]
    services["scheduler"].arguments += ["--advertise", advertised]
    pids = {name: scene.pid(name) for name in services}
    for pid in pids.values():
        assert pid is not None
        signal_to(pid, signal.SIGTERM)
    await eventually(lambda: all(scene.pid(name) not in (None, pids[name]) for name in pids))
    await eventually(scene.is_idle)


@asynccontextmanager
async def broken(network: Network, how: str, scene: Scene, victim: Victim) -> AsyncIterator[None]:
    """The way to the victim is broken until others have noticed."""
    way = network[victim.service]
    way.cut() if how == "cut" else way.stall()
    healing = asyncio.create_task(_heal_when_noticed(way, scene, victim))
    try:
        yield
        await healing
    finally:
        healing.cancel()
        way.heal()


async def _heal_when_noticed(way: Relay, scene: Scene, victim: Victim) -> None:
    if victim.service == "store":
        await eventually(lambda: scene.noticed(victim), what="the store is missed")
    else:
        await eventually(lambda: _has_lost_all(scene), what="the scheduler has lost its instances")
    way.heal()


async def _has_lost_all(scene: Scene) -> bool:
    return not await scene.instances()


@pytest.mark.parametrize("how", ["stall", "cut"])
@pytest.mark.parametrize("service", ["store", "scheduler"])
@pytest.mark.parametrize("phase", PHASES)
async def test_no_answer_differs(
    network: tuple[Scene, Network], phase: str, service: str, how: str
) -> None:
    scene, relays = network
    target, reached = PHASES[phase]
    pause_s = await endure(scene, target, reached, service, partial(broken, relays, how))
    print(f"{phase}, {service}, {how}: longest pause {pause_s:.2f} s")
