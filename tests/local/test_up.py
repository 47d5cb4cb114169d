"""Supervised processes: a port once they serve, one clear line when they can't, a clean end."""

import asyncio
import contextlib
import io
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio
from rich.console import Console

from millrace.core.errors import ConfigError
from millrace.local.options import StackOptions
from millrace.local.processes import service as service_module
from millrace.local.processes.service import Service, StartupError
from millrace.local.stack import Stack, UncleanStopError
from millrace.local.up import progress, run_until_stopped
from support.deadlines import HANG_S
from support.live_stack import eventually

QUICK = ["--port", "0"]


@pytest_asyncio.fixture
async def service(tmp_path: Path) -> AsyncIterator[Service]:
    made = Service("scheduler", ["scheduler", *QUICK], tmp_path / "scheduler.log")
    yield made
    await made.stop()


async def test_a_stack_that_comes_up_although_its_start_was_cancelled_is_stopped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A library that the start awaits may lose the cancellation: `up` left its folder once."""
    stopped, waits = asyncio.Event(), asyncio.Event()

    class Started:
        async def stop(self) -> None:
            stopped.set()

    async def starts(*_: object) -> Started:
        waits.set()
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return Started()

    stop = asyncio.Event()
    monkeypatch.setattr("millrace.local.up.start_with_progress", starts)
    monkeypatch.setattr("millrace.local.up.stop_event", lambda: stop)
    running = asyncio.create_task(run_until_stopped(StackOptions(model="")))
    await waits.wait()
    stop.set()
    await asyncio.wait_for(running, HANG_S)
    assert stopped.is_set()


async def test_serves_and_ends_well(service: Service) -> None:
    await service.start(HANG_S)
    _, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.close()
    await writer.wait_closed()

    await service.stop()

    assert service.process is not None
    assert service.process.returncode == 0
    assert service.ended_well


async def test_a_killed_service_did_not_end_well_and_starts_again(service: Service) -> None:
    await service.start(HANG_S)
    assert service.process is not None
    service.process.kill()
    await service.process.wait()
    assert not service.ended_well

    await service.start(HANG_S)
    await service.stop()
    assert service.ended_well


async def test_a_bad_setting_ends_the_start_with_its_line(tmp_path: Path) -> None:
    service = Service("s", ["scheduler", "--set", "scheduler.lease_s=-1"], tmp_path / "s.log")
    with pytest.raises(StartupError, match=r"scheduler\.lease_s"):
        await service.start(HANG_S)
    assert not service.serving


async def test_a_start_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    service = Service("s", ["scheduler", *QUICK], tmp_path / "s.log")
    with pytest.raises(StartupError, match="did not serve within"):
        await service.start(0.01)
    assert service.process is not None
    assert service.process.returncode is not None


async def test_a_stack_that_is_stopped_in_a_restart_leaves_no_process() -> None:
    """The supervisor must not start a service during `stop`."""
    stack = Stack(StackOptions(model="none"))
    service = stack.supervise(Service("scheduler", ["scheduler", *QUICK], stack.directory / "log"))
    await service.start(HANG_S)
    stack.keep()
    first = service.process
    assert first is not None
    os.kill(first.pid, signal.SIGKILL)
    await eventually(lambda: service.process not in (first, None))  # starting

    await stack.stop()

    second = service.process
    assert second is not None
    assert second.returncode is not None
    await asyncio.sleep(1.5)
    assert service.process is second
    assert not stack.directory.exists()


async def start_and_kill(stack: Stack, name: str) -> None:
    """Lets the stack have a scheduler by this name, and kills it once it serves."""
    service = stack.supervise(Service(name, ["scheduler", *QUICK], stack.directory / "log"))
    await service.start(HANG_S)
    assert service.process is not None
    service.process.kill()
    await service.process.wait()


async def test_a_stack_says_who_did_not_end_well() -> None:
    stack = Stack(StackOptions(model="none"))
    await start_and_kill(stack, "scheduler")

    with pytest.raises(UncleanStopError, match="scheduler ended with status -9"):
        await stack.stop()


async def test_a_service_that_was_killed_says_by_what(tmp_path: Path) -> None:
    """Its own last line says nothing of it: without memory the kernel ends it."""
    log = tmp_path / "decode-0.log"
    service = Service("decode-0", ["scheduler", *QUICK], log)
    await service.launch()
    assert service.process is not None
    service.process.kill()
    with pytest.raises(
        StartupError, match="decode-0: killed by SIGKILL, perhaps because memory ran out; its last"
    ):
        await service.wait_until_it_serves(HANG_S)


async def test_a_gateway_that_ends_before_it_takes_requests_is_named() -> None:
    stack = Stack(StackOptions(model="none"))
    await start_and_kill(stack, "proxy")
    with pytest.raises(StartupError, match="proxy: killed by SIGKILL"):
        await stack.wait_until_ready()
    with pytest.raises(UncleanStopError):
        await stack.stop()


async def test_a_role_s_instances_are_never_named_twice() -> None:
    stack = Stack(StackOptions(model="none"))
    first = stack.add("prefill")  # no such model
    second = stack.add("prefill")
    assert (first, second) == ("prefill-0", "prefill-1")
    assert stack.instances("prefill") == [first, second]
    await eventually(lambda: not stack.instances("prefill"))  # neither could start
    assert stack.add("prefill") == "prefill-2"
    assert stack.add("decode") == "decode-0"

    await stack.stop()

    assert not stack.directory.exists()


async def kept_instance() -> tuple[Stack, Service]:
    """A stack that keeps one process, by the name of an instance."""
    stack = Stack(StackOptions(model="none"))
    service = stack.supervise(Service("decode-0", ["scheduler", *QUICK], stack.directory / "log"))
    await service.start(HANG_S)
    stack.keep()
    return stack, service


async def test_an_instance_that_is_removed_is_not_started_again() -> None:
    stack, service = await kept_instance()
    process = service.process
    assert process is not None

    stack.remove("decode-0")
    assert stack.instances("decode") == []
    await eventually(lambda: process.returncode is not None)
    await stack.stop()

    assert service.process is process
    assert process.returncode == 0


async def test_an_instance_that_is_removed_as_it_begins_to_serve_is_stopped(monkeypatch) -> None:
    stack, service = await kept_instance()
    first, read = service.process, asyncio.StreamReader.readline

    async def read_and_remove(reader: asyncio.StreamReader) -> bytes:
        line = await read(reader)
        if b"port" in line:  # the next process serves
            stack.remove("decode-0")
        return line

    monkeypatch.setattr(asyncio.StreamReader, "readline", read_and_remove)
    assert first is not None
    first.kill()
    await eventually(lambda: not stack.instances("decode"))
    async with asyncio.timeout(HANG_S):
        await stack.stop()
    assert service.process not in (first, None)
    assert service.process.returncode == 0


async def test_an_instance_that_dies_just_before_its_removal_is_no_error() -> None:
    """The scheduler knows of the death first: autoscaling removes what was to go and is gone."""
    stack, service = await kept_instance()
    process = service.process
    assert process is not None
    fork_server = psutil.Process(process.pid).parent()
    assert fork_server is not None

    fork_server.suspend()  # which tells of the death
    try:
        process.kill()
        stack.remove("decode-0")
        for _ in range(100):  # until it waits for the death
            await asyncio.sleep(0)
        assert process.returncode is None
    finally:
        fork_server.resume()
    await stack.stop()
    assert process.returncode == -signal.SIGKILL


async def test_a_removed_instance_that_does_not_drain_is_an_error(monkeypatch) -> None:
    monkeypatch.setattr(service_module, "STOP_TIMEOUT_S", 0.01)
    stack, service = await kept_instance()
    assert service.process is not None
    os.kill(service.process.pid, signal.SIGSTOP)

    stack.remove("decode-0")
    with pytest.raises(UncleanStopError, match="decode-0 ended with status -9"):
        await stack.stop()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_step_is_shown_as_it_is(is_terminal: bool) -> None:
    """A folder may be named as rich's markup is; a line in a log stays one line."""
    step = "loading /data/[bold]models/" + "x" * 30
    shown = io.StringIO()
    console = Console(file=shown, width=40 if not is_terminal else 80, force_terminal=is_terminal)
    with progress(console) as show:
        show(step)
    assert step in shown.getvalue()


def test_kvp_workers_stand_beside_whatever_computes() -> None:
    assert StackOptions(model="m").fleet == {"prefill": 2, "decode": 1}
    assert StackOptions(model="m", kvp=2).fleet == {"prefill": 2, "decode": 1, "kvp": 2}
    assert StackOptions(model="m", colocated=1, kvp=1).fleet == {"colocated": 1, "kvp": 1}


@pytest.mark.parametrize(
    "cores, changes, sizes",
    [
        (2, {}, (2,)),  # two instances of one thread each
        (8, {"threads": 2, "prefill": 8}, (2, 4)),
        (8, {"threads": 1, "prefill": 3}, (2,)),
        (8, {"threads": 8, "prefill": 4}, ()),  # they would share cores
        (8, {"threads": 1, "most": {"prefill": 4}}, (2, 4)),
        (8, {"threads": 1, "devices": ["0", "1"]}, ()),
        (8, {"threads": 1, "prefill": 4, "colocated": 2}, ()),
    ],
)
def test_groups_are_measured_where_their_instances_have_cores_of_their_own(
    monkeypatch: pytest.MonkeyPatch, cores: int, changes: dict, sizes: tuple[int, ...]
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(cores)))
    assert StackOptions(model="m", **changes).group_sizes == sizes


def test_models_of_one_stack_have_names_of_their_own() -> None:
    assert StackOptions(model="m").models() == [("m", "")]
    two = StackOptions(model="/a/m", more=[("/b/n", ""), ("org/x", "y")])
    assert two.models() == [("/a/m", "m"), ("/b/n", "n"), ("org/x", "y")]
    with pytest.raises(ConfigError, match="two models have the name 'm'"):
        StackOptions(model="/a/m", more=[("/b/m", "")]).models()


def test_every_model_needs_devices_of_its_own() -> None:
    one = StackOptions(model="m", prefill=1, decode=1, devices=["0", "1"])
    assert one.device_pool()
    with pytest.raises(ConfigError, match="2 prefill"):
        StackOptions(
            model="m", more=[("n", "")], prefill=1, decode=1, devices=["0", "1"]
        ).device_pool()


async def test_each_service_has_a_port_for_its_metrics() -> None:
    stack = Stack(StackOptions(model="m", metrics_port=9090))
    for name in ("scheduler", "proxy", "colocated-0", "prefill-0"):
        stack.service(name, [name.rpartition("-")[0] or name])
    # A colocated pair has two.
    assert stack.metrics_ports == {"scheduler": 9090, "colocated-0": 9091, "prefill-0": 9093}
    for name, port in stack.metrics_ports.items():
        assert stack.services[name].arguments[-2:] == ["--set", f"telemetry.metrics_port={port}"]
    assert stack.services["proxy"].arguments == ["proxy"]
    await stack.stop()
