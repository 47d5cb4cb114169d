"""A whole worker in this process, with real engine, NIXL and scheduler: its readiness."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import httpx
import pytest
import torch

from millrace.core.backoff import Backoff
from millrace.core.config import Config, EngineConfig, TelemetryConfig
from millrace.core.errors import ConfigError
from millrace.core.scheduler.reports import Registration
from millrace.decode.loop import DecodeRole
from millrace.instance import host as host_module
from millrace.instance.host import WorkerOptions, serve_worker
from millrace.instance.transfer.kv_path import KvPath
from millrace.prefill.loop import PrefillRole
from millrace.transfer.probe.pattern import End, ProbeDiedError
from millrace.transfer.probe.process import ProbeServer
from millrace.transfer.transport.peers import PeerMetadata
from millrace.wire.address import host_port
from millrace.wire.pb import scheduler_pb2
from support.deadlines import HANG_S, eventually
from support.metrics import total
from support.scheduler_peers import Net, scheduler
from support.tiny_models import model_folder


def free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        return probe.getsockname()[1]


class Worker:
    """A worker that runs until the test ends. `ready` is set when the scheduler accepts it."""

    def __init__(self, role: str, net: Net, *, host: str = "127.0.0.1", **options: Any) -> None:
        self.metrics = f"http://{host_port(host, port := free_port(host))}"
        self.stop = asyncio.Event()
        self.port: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        wanted = WorkerOptions(
            model=str(model_folder("llama")),
            model_name="tiny",
            scheduler=net.address,
            instance_id=f"{role}-0",
            host=host,
            drain_timeout_s=1.0,
            **options,
        )
        config = Config(
            engine=EngineConfig(device="cpu", dtype="float32", threads=1, kv_bytes=4 << 20),
            telemetry=TelemetryConfig(metrics_port=port),
        )
        build = {"prefill": PrefillRole, "decode": DecodeRole}[role]
        self.task = asyncio.create_task(serve_worker(wanted, config, build, self.port.set_result))

    async def get(self, path: str) -> int:
        """Returns the status of a GET; 0 while no server answers."""
        async with httpx.AsyncClient(timeout=HANG_S) as client:
            try:
                return (await client.get(f"{self.metrics}{path}")).status_code
            except httpx.TransportError:
                return 0

    async def metric(self, name: str, **labels: str) -> float:
        async with httpx.AsyncClient(timeout=HANG_S) as client:
            text = (await client.get(f"{self.metrics}/metrics")).text
        return total(text, name, **labels)

    async def serving(self) -> Worker:
        await asyncio.wait(
            [self.task, self.port], timeout=HANG_S, return_when=asyncio.FIRST_COMPLETED
        )
        if self.task.done():
            await self.task
        assert self.port.done()
        return self


@contextlib.asynccontextmanager
async def worker(role: str, net: Net, monkeypatch: Any, **options: Any) -> AsyncIterator[Worker]:
    """Ends the worker as SIGTERM would; raises on a leak."""
    made = Worker(role, net, **options)
    monkeypatch.setattr(host_module, "stop_event", lambda: made.stop)
    try:
        await asyncio.sleep(0)  # the worker takes the event now
        yield made
    finally:
        made.stop.set()
        await asyncio.wait_for(made.task, HANG_S)


async def instances(net: Net) -> dict[str, scheduler_pb2.InstanceStatus]:
    return {one.incarnation.id: one for one in (await net.status()).instances}


async def test_health_answers_while_weights_load_and_ready_waits_for_all(monkeypatch) -> None:
    loads, loaded = threading.Event(), threading.Event()
    load = host_module.open_for

    def slow(*arguments: Any) -> Any:
        loads.set()
        assert loaded.wait(HANG_S)
        return load(*arguments)

    monkeypatch.setattr(host_module, "open_for", slow)
    async with scheduler() as net, worker("decode", net, monkeypatch) as decode:
        await asyncio.to_thread(loads.wait, HANG_S)
        assert (await decode.get("/health"), await decode.get("/ready")) == (200, 503)
        assert not await instances(net)
        loaded.set()
        await decode.serving()
        assert await decode.get("/ready") == 200
        assert await decode.metric("millrace_transfer_probe_seconds_count", of="loopback") == 1
        decode.stop.set()
        await asyncio.wait_for(decode.task, HANG_S)
        assert not await instances(net)


async def test_it_registers_once_a_peer_passed_its_probe(monkeypatch, caplog) -> None:
    """The scheduler lists an absent peer first, then a live peer."""
    monkeypatch.setattr(host_module, "KvPath", partial(KvPath, retry=Backoff(0.05, 1.0)))
    async with scheduler() as net, contextlib.AsyncExitStack() as stack:
        await net.worker("dead", address="127.0.0.1:1")
        prefill = await stack.enter_async_context(worker("prefill", net, monkeypatch))
        await eventually(lambda: "not ready: KV can't travel" in caplog.text, HANG_S)
        assert (await prefill.get("/health"), await prefill.get("/ready")) == (200, 503)
        assert sorted(await instances(net)) == ["dead"]
        decode = await stack.enter_async_context(worker("decode", net, monkeypatch))
        await decode.serving()
        await prefill.serving()
        assert await prefill.get("/ready") == 200
        assert await prefill.metric("millrace_transfer_probe_errors_total", of="peer") >= 1
        assert sorted(await instances(net)) == ["dead", "decode-0", "prefill-0"]


async def test_a_crash_in_its_own_probe_does_not_end_it(monkeypatch, caplog) -> None:
    open_end, died = ProbeServer.open_end, list[int]()

    @contextlib.asynccontextmanager
    async def fatal(server: ProbeServer, *arguments: Any) -> AsyncIterator[End]:
        async with open_end(server, *arguments) as end:
            if not died:
                died.append(PeerMetadata.decode(end.metadata).process.pid)
                os.kill(died[0], signal.SIGABRT)
                with pytest.raises(ProbeDiedError):  # because it is dead
                    await end.exchange(end.metadata, 0, HANG_S)
            yield end

    monkeypatch.setattr(ProbeServer, "open_end", fatal)
    async with scheduler() as net, worker("decode", net, monkeypatch) as decode:
        await decode.serving()
        assert await decode.get("/ready") == 200
        assert await decode.metric("millrace_transfer_probe_seconds_count", of="loopback") == 1
    assert died and died != [os.getpid()]
    assert "the probe's process was ended" in caplog.text


async def test_one_that_never_got_ready_ends_at_once(monkeypatch, caplog) -> None:
    async with scheduler() as net:
        await net.worker("dead", address="127.0.0.1:1")
        async with worker("prefill", net, monkeypatch):
            await eventually(lambda: "not ready: KV can't travel" in caplog.text, HANG_S)


async def test_over_ipv6_addresses_have_brackets_and_kv_travels(monkeypatch, caplog) -> None:
    async with scheduler() as net, worker("decode", net, monkeypatch, host="::1") as decode:
        await decode.serving()
        address = (await instances(net))["decode-0"].address
        assert address == f"[::1]:{decode.port.result()}"
        with caplog.at_level("INFO"):
            async with worker("prefill", net, monkeypatch, host="::1") as prefill:
                await prefill.serving()
        assert "KV travels to and from 1 of 1 peers" in caplog.text


async def test_the_revision_is_part_of_what_names_the_weights(monkeypatch) -> None:
    seen: list[Registration] = []
    complete = DecodeRole.complete_registration

    def kept(role: DecodeRole, base: Registration) -> Registration:
        seen.append(complete(role, base))
        return seen[-1]

    monkeypatch.setattr(DecodeRole, "complete_registration", kept)
    async with scheduler() as net:
        for revision in ("", "r2"):
            async with worker("decode", net, monkeypatch, revision=revision) as decode:
                await decode.serving()
    plain, revised = (message.model_hash for message in seen)
    assert plain and revised == f"{plain}@r2"


@pytest.mark.parametrize(("device", "seen"), [("cuda:0", 4), ("cuda:2", 9)])
def test_ranks_without_a_gpu_each_are_refused_before_anything_is_loaded(
    monkeypatch, device, seen
) -> None:
    monkeypatch.setattr(host_module, "resolve_device", lambda name: torch.device(device))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(host_module, "open_engines", lambda *_, **__: pytest.fail("it loads"))
    options = WorkerOptions(model="none", model_name="none", scheduler="127.0.0.1:1")
    config = Config(engine=EngineConfig(tensor_parallel=8))
    with pytest.raises(ConfigError, match=rf"tensor_parallel is 8 on {device}; .* [47] GPUs from"):
        host_module.open_for(options, config, 1)


def test_stages_count_among_the_gpus_of_an_instance(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 5)
    config = EngineConfig(tensor_parallel=2, stages=3)
    with pytest.raises(ConfigError, match=r"parallel is 2 and engine\.stages 3 on .* 6 in all"):
        host_module.check_devices(config, torch.device("cuda:0"))
    host_module.check_devices(EngineConfig(stages=5), torch.device("cuda:0"))
    host_module.check_devices(config, torch.device("cpu"))


def test_ranks_on_cpus_and_those_with_a_gpu_each_are_not(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for ranks, device in ((1, "cuda:1"), (2, "cuda:0"), (8, "cpu")):
        host_module.check_devices(EngineConfig(tensor_parallel=ranks), torch.device(device))
