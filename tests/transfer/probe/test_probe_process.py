"""Ends of probes in children, over NIXL: their results, and the handling of a dead child."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from millrace.core.backoff import Backoff
from millrace.core.errors import TransferError
from millrace.core.incarnation import Incarnation
from millrace.instance.transfer import kv_path as kv_path_module
from millrace.instance.transfer.kv_path import KvPath
from millrace.instance.transfer.probe_servicer import ProbeServicer
from millrace.telemetry.metrics import Registry
from millrace.transfer.probe.pattern import (
    LOOPBACK_TRIES,
    End,
    ProbeDiedError,
    ProbeError,
    probe_loopback,
)
from millrace.transfer.probe.process import ProbeServer
from millrace.transfer.transport.base import PeerLostError, outcome
from millrace.transfer.transport.byte_window import ByteWindow
from millrace.transfer.transport.nixl.transport import NixlTransport
from millrace.transfer.transport.peers import PeerMetadata
from millrace.wire.server import bind, create_server
from support.deadlines import HANG_S, eventually
from support.scheduler_peers import Net, scheduler

SIZE = 4096


def pid_of(end: End) -> int:
    return PeerMetadata.decode(end.metadata).process.pid


def parent_of(pid: int) -> int:
    """Returns the child that is the server."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def is_there(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


class Process(NamedTuple):
    threads: int
    libraries: str


def process(pid: int) -> Process:
    folder = Path(f"/proc/{pid}")
    return Process(len(list((folder / "task").iterdir())), (folder / "maps").read_text())


class Fatal:
    """A server whose first `deaths` ends abort once they are open."""

    def __init__(self, server: ProbeServer, deaths: int) -> None:
        self.opened: list[str] = []
        self.pids: list[int] = []
        self._server = server
        self._deaths = deaths

    @contextlib.asynccontextmanager
    async def open_end(self, name: str, seed: int, size: int) -> AsyncIterator[End]:
        self.opened.append(name)
        async with self._server.open_end(name, seed, size) as end:
            self.pids.append(pid_of(end))
            if len(self.opened) <= self._deaths:
                os.kill(pid_of(end), signal.SIGABRT)
                await eventually(lambda: not is_there(pid_of(end)))
            yield end


async def test_two_children_exchange_patterns_and_end() -> None:
    async with (
        ProbeServer("a", "cpu") as a,
        ProbeServer("b", "cpu") as b,
    ):
        async with a.open_end("1", 1, SIZE) as one, b.open_end("1", 2, SIZE) as other:
            assert (one.name, other.name) == ("a-1", "b-1")
            pids = pid_of(one), pid_of(other)
            assert len({*pids, os.getpid()}) == 3
            await asyncio.gather(
                one.exchange(other.metadata, other.seed, HANG_S),
                other.exchange(one.metadata, one.seed, HANG_S),
            )
        assert not any(is_there(pid) for pid in pids)


async def test_what_a_child_finds_wrong_is_told_as_it_says_it() -> None:
    async with ProbeServer("a", "cpu") as a, ProbeServer("b", "cpu") as b:
        async with a.open_end("1", 1, SIZE) as one, b.open_end("1", 2, SIZE) as other:
            _, failed = await asyncio.gather(
                one.exchange(other.metadata, 77, HANG_S),
                other.exchange(one.metadata, one.seed, HANG_S),
                return_exceptions=True,
            )
            assert isinstance(failed, ProbeError) and not isinstance(failed, ProbeDiedError)
            assert "of 4096 is not what the peer wrote" in str(failed)
        async with a.open_end("2", 1, SIZE) as one:
            with pytest.raises(TransferError, match="not a transport's metadata"):
                await one.exchange(b"nonsense", 1, HANG_S)


async def test_the_server_has_one_thread_and_no_transport_and_nothing_loads_torch() -> None:
    """The forked process must have one thread, and a probe's imports must be small."""
    async with ProbeServer("a", "cpu") as a, a.open_end("1", 1, SIZE) as end:
        server, child = process(parent_of(pid_of(end))), process(pid_of(end))
    assert (server.threads, child.threads > 1) == (1, True)
    for one in (server, child):
        assert "libplugin_UCX" in one.libraries
        assert "torch" not in one.libraries


async def test_a_child_that_aborts_is_a_failed_probe_with_the_signals_name() -> None:
    async with ProbeServer("a", "cpu") as a, ProbeServer("b", "cpu") as b:
        async with a.open_end("1", 1, SIZE) as one, b.open_end("1", 2, SIZE) as other:
            waiting = asyncio.create_task(one.exchange(other.metadata, other.seed, HANG_S))
            os.kill(pid_of(one), signal.SIGABRT)
            with pytest.raises(ProbeDiedError, match="was ended by SIGABRT"):
                await waiting
        async with a.open_end("2", 1, SIZE) as again:  # the server has lost nothing
            assert is_there(pid_of(again))


async def test_a_transport_never_connects_to_a_process_that_has_ended() -> None:
    """UCX has aborted the process whose connection was refused."""
    transport = NixlTransport("connects")
    try:
        async with ProbeServer("a", "cpu") as a, a.open_end("1", 1, SIZE) as end:
            os.kill(pid_of(end), signal.SIGKILL)
            await eventually(lambda: not is_there(pid_of(end)))
            with pytest.raises(PeerLostError, match="can't connect to a-1: its process has ended"):
                await outcome(transport.connect(end.metadata))
    finally:
        await asyncio.to_thread(transport.close)


async def test_an_end_that_is_given_up_leaves_no_process() -> None:
    async with ProbeServer("a", "cpu") as a:
        opened: asyncio.Future[int] = asyncio.get_running_loop().create_future()

        async def probe() -> None:
            async with a.open_end("1", 1, SIZE) as end:
                opened.set_result(pid_of(end))
                await asyncio.Event().wait()

        task = asyncio.create_task(probe())
        pid = await opened
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert not is_there(pid)


async def test_a_server_that_died_is_started_again_and_its_children_are_told_of() -> None:
    async with ProbeServer("a", "cpu") as a:
        async with a.open_end("1", 1, SIZE) as end:
            os.kill(parent_of(pid_of(end)), signal.SIGKILL)
            os.kill(pid_of(end), signal.SIGKILL)
            with pytest.raises(ProbeDiedError, match="was ended with its server"):
                await end.exchange(end.metadata, 1, HANG_S)
        async with a.open_end("2", 1, SIZE) as end:
            assert is_there(pid_of(end))


@pytest.mark.parametrize("deaths", [0, 1, LOOPBACK_TRIES])
async def test_the_loopback_is_tried_again_where_its_child_dies(deaths, caplog) -> None:
    storage = torch.arange(1 << 18, dtype=torch.float32)
    pool, before = ByteWindow(storage), storage.clone()
    transport = NixlTransport(f"own-{deaths}")
    try:
        region = transport.register(pool.memory)
        async with ProbeServer(f"own-{deaths}", "cpu") as server:
            ends = Fatal(server, deaths)
            passes = contextlib.nullcontext()
            if deaths == LOOPBACK_TRIES:
                passes = pytest.raises(ProbeDiedError, match="was ended by SIGABRT")
            with passes:
                await probe_loopback(transport, region, pool, ends.open_end, HANG_S)
    finally:
        await asyncio.to_thread(transport.close)
    assert len(ends.opened) == min(deaths + 1, LOOPBACK_TRIES)
    assert caplog.text.count("was ended by SIGABRT; trying again") == len(ends.opened) - 1
    assert torch.equal(storage, before)
    assert not any(is_there(pid) for pid in ends.pids)


@contextlib.asynccontextmanager
async def node(name: str, net: Net, deaths: int) -> AsyncIterator[tuple[KvPath, Fatal]]:
    """An instance that the scheduler lists; its first children abort."""
    async with ProbeServer(name, "cpu") as server:
        ends = Fatal(server, deaths)
        path = KvPath(Incarnation(name, 1), ends.open_end, Registry(), Backoff(0.01, 1.0))
        grpc_server = create_server()
        ProbeServicer(path, "", "cpu").add_to(grpc_server)
        address = f"127.0.0.1:{bind(grpc_server, '127.0.0.1', 0)}"
        await grpc_server.start()
        try:
            await net.worker(name, address=address)
            yield path, ends
        finally:
            await grpc_server.stop(None)


@pytest.mark.parametrize("where", ["asker", "asked"])
async def test_a_crash_in_a_probe_ends_neither_instance(where, monkeypatch, caplog) -> None:
    """UCX once aborted a decode instance in a probe. Now the next attempt passes."""
    monkeypatch.setattr(kv_path_module, "EXCHANGE_TIMEOUT_S", 3.0)
    async with (
        scheduler() as net,
        node("p0", net, deaths=1 if where == "asked" else 0) as (_, asked),
        node("d0", net, deaths=1 if where == "asker" else 0) as (path, asker),
    ):
        await asyncio.wait_for(path.reach_peers(net.address, "decode"), HANG_S)
        assert (len(asker.opened), len(asked.opened)) == (2, 2)
    assert "not ready: KV can't travel between d0 and any of the 1 asked" in caplog.text
    dead = "p0" if where == "asked" else "d0"
    found = [
        "the probe's process was ended by SIGABRT",
        f"can't connect to {dead}-probe-1: its process has ended",  # its peer notices it first
    ]
    assert any(why in caplog.text for why in found)
