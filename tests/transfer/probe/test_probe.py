"""Probes of the KV path: successes, failures found, and no leftovers."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch

from millrace.core.backoff import Backoff
from millrace.core.errors import TransferError
from millrace.core.incarnation import Incarnation
from millrace.instance.transfer import kv_path as kv_path_module
from millrace.instance.transfer.kv_path import KvPath, chosen_peers
from millrace.instance.transfer.probe_servicer import ProbeServicer
from millrace.telemetry.metrics import Registry
from millrace.transfer.probe.pattern import (
    PATTERN_BYTES,
    End,
    ProbeEnd,
    ProbeError,
    probe_end,
    probe_loopback,
)
from millrace.transfer.transport.base import Transport, outcome
from millrace.transfer.transport.byte_window import ByteWindow
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.wire.channel import open_channel
from millrace.wire.clients.scheduler_client import InstanceView
from millrace.wire.pb import transfer_pb2, transfer_pb2_grpc
from millrace.wire.server import bind, create_server
from support.deadlines import HANG_S, eventually
from support.memory_transport import MemoryHub, MemoryTransport
from support.metrics import total
from support.scheduler_peers import Net, scheduler

SIZE = 4096
QUICK, NEVER = Backoff(0.01, 1.0), Backoff(60.0, 60.0)
_numbers = itertools.count()

Make = Callable[[str], Transport]


class Hub(MemoryHub):
    """A hub that lists its transports."""

    @property
    def names(self) -> set[str]:
        return set(self._ends)


@pytest.fixture
def hub() -> Hub:
    return Hub()


@pytest.fixture(params=["memory", "nixl"])
def make(request, hub) -> Make:
    """Opens a transport under a unique name."""

    def opened(name: str) -> Transport:
        name = f"{name}-{next(_numbers)}"
        return NixlTransport(name) if request.param == "nixl" else MemoryTransport(name, hub)

    return opened


def window(size: int = SIZE) -> ByteWindow:
    return ByteWindow(torch.zeros(2 * size, dtype=torch.uint8))


@contextlib.asynccontextmanager
async def two_ends(make: Make) -> AsyncIterator[tuple[ProbeEnd, ProbeEnd]]:
    def end(name: str, seed: int) -> contextlib.AbstractAsyncContextManager[ProbeEnd]:
        return probe_end(lambda: make(name), window(), seed=seed, size=SIZE)

    async with end("one", 1) as one, end("other", 2) as other:
        yield one, other


async def test_patterns_that_come_both_ways_pass(make) -> None:
    async with two_ends(make) as (one, other):
        await asyncio.gather(
            one.exchange(other.metadata, other.seed, HANG_S),
            other.exchange(one.metadata, one.seed, HANG_S),
        )


async def test_other_bytes_than_wanted_are_found_at_either_end(make) -> None:
    async with two_ends(make) as (one, other):
        passed, failed = await asyncio.gather(
            one.exchange(other.metadata, 77, HANG_S),
            other.exchange(one.metadata, one.seed, HANG_S),
            return_exceptions=True,
        )
    assert passed is None
    assert isinstance(failed, ProbeError)
    assert "of 4096 is not what the peer wrote" in str(failed)


async def test_a_peer_that_writes_nothing_is_waited_for_so_long(make) -> None:
    """A busy machine may need longer to connect: then it is asked again, with more time."""
    within_s, step = 0.3, ""
    async with two_ends(make) as (one, other):
        while not step.startswith("waiting for what the peer writes"):
            assert within_s < HANG_S
            with pytest.raises(ProbeError, match=f" did not end within {within_s:g} s$") as failed:
                await one.exchange(other.metadata, other.seed, within_s)
            step, within_s = str(failed.value), 2 * within_s


async def test_a_peer_that_is_gone_is_an_error_not_a_wait(hub) -> None:
    make: Make = lambda name: MemoryTransport(name, hub)  # noqa: E731
    async with probe_end(lambda: make("one"), window(), seed=1, size=SIZE) as one:
        async with probe_end(lambda: make("other"), window(), seed=2, size=SIZE) as other:
            metadata = other.metadata
        with pytest.raises(TransferError, match="other is gone"):
            await one.exchange(metadata, 2, HANG_S)


async def test_a_probe_that_is_given_up_while_its_transport_opens_leaves_none(hub) -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def slow() -> Transport:
        loop.call_soon_threadsafe(begun.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(HANG_S)
        return MemoryTransport("slow", hub)

    async def probe() -> None:
        async with probe_end(slow, window(), seed=1, size=SIZE):
            pass

    task = asyncio.create_task(probe())
    await begun.wait()
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not hub.names


async def test_a_probe_that_is_cancelled_while_its_transport_closes_leaves_none(hub) -> None:
    """An asker ends its part and closes its stream: the second may come before a thread is free to
    close.
    """
    loop, go_on = asyncio.get_running_loop(), threading.Event()
    loop.set_default_executor(ThreadPoolExecutor(1))
    opened, leave = asyncio.Event(), asyncio.Event()

    async def probe() -> None:
        async with probe_end(lambda: MemoryTransport("one", hub), window(), seed=1, size=SIZE):
            opened.set()
            await leave.wait()

    task = asyncio.create_task(probe())
    await opened.wait()
    busy = loop.run_in_executor(None, go_on.wait, HANG_S)
    leave.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert hub.names == {"one"}
    go_on.set()
    await busy
    await eventually(lambda: not hub.names)


@pytest.mark.parametrize("pool_bytes", [1000, 4 * PATTERN_BYTES])
async def test_the_loopback_moves_the_pool_and_leaves_it_as_it_was(make, pool_bytes) -> None:
    transport = make("own")
    storage = torch.arange(pool_bytes // 4, dtype=torch.float32).reshape(2, -1)
    pool, before = ByteWindow(storage), storage.clone()
    extra = transport.register(window().memory)
    region = transport.register(pool.memory)
    opened: list[Transport] = []

    def open_end(
        name: str, seed: int, size: int
    ) -> contextlib.AbstractAsyncContextManager[ProbeEnd]:
        def another() -> Transport:
            opened.append(make(name))
            return opened[0]

        return probe_end(another, window(size), seed=seed, size=size)

    try:
        await probe_loopback(transport, region, pool, open_end, HANG_S)
        assert (extra, region) == (0, 1)
        assert torch.equal(storage, before)
        with pytest.raises(TransferError):  # the transport has forgotten the other end
            await outcome(transport.notify(opened[0].name, b"\x05"))
    finally:
        await asyncio.to_thread(transport.close)


# -- between instances, over gRPC


class Node:
    """The parts of an instance that send and answer probes."""

    def __init__(self, name: str, hub: Hub, retry: Backoff) -> None:
        self.registry = Registry()
        self.opened: list[str] = []
        self._hub = hub
        self.path = KvPath(
            Incarnation(name, 1),
            self._open,
            self.registry,
            retry,
        )
        self.server = create_server()
        ProbeServicer(self.path, "", "cpu").add_to(self.server)
        self.address = f"127.0.0.1:{bind(self.server, '127.0.0.1', 0)}"

    def _open(self, name: str, seed: int, size: int) -> contextlib.AbstractAsyncContextManager[End]:
        self.opened.append(name)

        def transport() -> Transport:
            return MemoryTransport(f"{self.address}-{name}", self._hub)

        return probe_end(transport, window(size), seed=seed, size=size)

    def count(self, metric: str, **labels: str) -> float:
        return total(self.registry, metric, **labels)


@contextlib.asynccontextmanager
async def nodes(hub: Hub, *names: str, retry: Backoff = QUICK) -> AsyncIterator[list[Node]]:
    made = [Node(name, hub, retry) for name in names]
    for node in made:
        await node.server.start()
    try:
        yield made
    finally:
        for node in made:
            await node.server.stop(None)


async def join(net: Net, name: str, address: str) -> None:
    """An instance that the scheduler lists, at any address."""
    await net.worker(name, address=address)


async def test_an_instance_that_starts_probes_those_that_are_there(hub) -> None:
    async with scheduler() as net, nodes(hub, "d0", "p0", "p1") as (d0, p0, p1):
        await join(net, "d0", d0.address)
        await join(net, "p0", p0.address)
        await p1.path.reach_peers(net.address, "prefill")
        assert (len(d0.opened), len(p0.opened), len(p1.opened)) == (1, 1, 2)
        assert p1.count("millrace_transfer_probe_seconds_count", of="peer") == 2
        await eventually(lambda: not hub.names)


async def test_where_nobody_is_nothing_is_asked(hub) -> None:
    async with scheduler() as net, nodes(hub, "d0") as (d0,):
        await join(net, "d1", "127.0.0.1:1")  # decode does not probe decode
        await asyncio.wait_for(d0.path.reach_peers(net.address, "decode"), HANG_S)
    assert not d0.opened


async def test_one_healthy_peer_is_enough_and_the_others_are_told(hub, caplog) -> None:
    async with scheduler() as net, nodes(hub, "p0", "d0") as (p0, d0):
        await join(net, "p0", p0.address)
        await join(net, "p1", "127.0.0.1:1")
        await d0.path.reach_peers(net.address, "decode")
    assert "no KV travels to and from prefill p1 at 127.0.0.1:1: unavailable: " in caplog.text
    assert d0.count("millrace_transfer_probe_errors_total") == 1


async def test_where_all_fail_it_is_said_and_tried_again(hub, caplog) -> None:
    async with scheduler() as net, nodes(hub, "p0", "d0") as (p0, d0):
        await join(net, "p1", "127.0.0.1:1")
        reaching = asyncio.create_task(d0.path.reach_peers(net.address, "decode"))
        await eventually(lambda: "not ready: KV can't travel between d0 and any" in caplog.text)
        assert not reaching.done()
        await join(net, "p0", p0.address)
        await asyncio.wait_for(reaching, HANG_S)
    assert "prefill p1 at 127.0.0.1:1: unavailable" in caplog.text
    assert not hub.names


async def test_without_a_scheduler_it_waits_for_one(hub, caplog) -> None:
    async with nodes(hub, "d0") as (d0,):
        reaching = asyncio.create_task(d0.path.reach_peers("127.0.0.1:1", "decode"))
        await eventually(lambda: "no scheduler at 127.0.0.1:1" in caplog.text)
        assert not reaching.done()
        reaching.cancel()
        await asyncio.gather(reaching, return_exceptions=True)


async def test_what_the_asked_one_finds_wrong_reaches_the_asker(hub, monkeypatch, caplog) -> None:
    """The asker's bytes arrive corrupted: only the asked end can see that."""
    copy = MemoryTransport.copy

    def spoilt(self, peer, runs, notification, regions):
        if self.name.startswith(d0.address):
            notification = b""
        copy(self, peer, runs, notification, regions)

    monkeypatch.setattr(MemoryTransport, "copy", spoilt)
    monkeypatch.setattr(kv_path_module, "EXCHANGE_TIMEOUT_S", 0.3)
    async with scheduler() as net, nodes(hub, "p0", "d0", retry=NEVER) as (p0, d0):
        await join(net, "p0", p0.address)
        reaching = asyncio.create_task(d0.path.reach_peers(net.address, "decode"))
        await eventually(lambda: "not ready" in caplog.text)
        reaching.cancel()
        await asyncio.gather(reaching, return_exceptions=True)
        await eventually(lambda: not hub.names)
    assert "at the peer: waiting for what the peer writes did not end within 0.3 s" in caplog.text
    assert "the KV path from d0, which starts" in caplog.text


async def test_an_asker_that_goes_away_leaves_nothing_at_the_asked_one(hub) -> None:
    async with nodes(hub, "p0") as (p0,), open_channel(p0.address) as channel:
        call = transfer_pb2_grpc.TransferProbeStub(channel).Probe(timeout=HANG_S)
        async with probe_end(
            lambda: MemoryTransport("gone", hub), window(PATTERN_BYTES), seed=1, size=PATTERN_BYTES
        ) as end:
            endpoint = transfer_pb2.ProbeEndpoint(agent_metadata=end.metadata, seed=1)
            await call.write(transfer_pb2.ProbeRequest(endpoint=endpoint))
            reply = await call.read()
            assert reply.WhichOneof("kind") == "endpoint" and len(hub.names) == 2
            call.cancel()
            with contextlib.suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
                await call.code()
            await eventually(lambda: hub.names == {"gone"})


def view(name: str, role: str, *, draining: bool = False) -> InstanceView:
    return InstanceView(
        id=name,
        role=role,
        address=f"{name}:1",
        draining=draining,
        running=0,
        waiting=0,
        held_requests=0,
        total_pages=1,
        free_pages=1,
    )


def test_peers_are_those_that_kv_is_exchanged_with() -> None:
    fleet = [view(f"{role[0]}{i}", role) for role in ("prefill", "decode", "kvp") for i in range(5)]
    for role, wanted in (
        ("prefill", {"prefill": 2, "decode": 2, "kvp": 2}),
        ("decode", {"prefill": 2, "kvp": 2}),
        ("kvp", {"prefill": 2, "decode": 2}),
    ):
        roles = [peer.role for peer in chosen_peers(fleet, role, "p0")]
        assert {name: roles.count(name) for name in {*roles}} == wanted
    assert chosen_peers([view("p0", "prefill")], "prefill", "p0") == []
    assert chosen_peers([view("p1", "prefill", draining=True)], "decode", "d0") == []
