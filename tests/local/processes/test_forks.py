"""Services are forks of one server: each has its own settings, and none outlives its parent."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import psutil
import pytest

from millrace.local.processes.service import Service, StartupError
from support.deadlines import HANG_S

Make = Callable[..., Awaitable[Service]]
QUICK = ["scheduler", "--port", "0"]

PARENT = """
import asyncio, sys
from pathlib import Path
from millrace.local.processes.service import Service

async def main():
    service = Service("scheduler", sys.argv[2:], Path(sys.argv[1]))
    await service.start(120)
    print(service.process.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""

ENDING = """
import atexit, sys, threading
from millrace.local.processes.fork_server import QuickEnd

end = QuickEnd()
module = type("Module", (), {{"__del__": lambda self: print("taken down")}})()
atexit.register(print, "registered")
threading.Timer(0.1, print, ["thread"]).start()
print("main")
with end.giving_status():
    {last}
"""


def service(folder: Path, name: str = "one", **environment: str) -> Service:
    return Service(name, list(QUICK), folder / f"{name}.log", environment)


def fork_server() -> psutil.Process:
    """The server of this process: it was started for an earlier service."""
    for child in psutil.Process().children():
        if "millrace.local.processes.fork_server" in child.cmdline():
            return child
    raise AssertionError("this process has no fork server")


async def test_each_has_its_own_environment_and_name(tmp_path: Path) -> None:
    bad = service(tmp_path, "bad", MILLRACE_SCHEDULER__LEASE_S="-1")
    with pytest.raises(StartupError, match=r"scheduler\.lease_s"):
        await bad.start(HANG_S)
    good = service(tmp_path)
    await good.start(HANG_S)
    assert good.process is not None
    assert psutil.Process(good.process.pid).cmdline()[0].startswith("millrace scheduler --port 0")
    assert os.getsid(good.process.pid) == good.process.pid  # a terminal's Ctrl-C passes it by
    await good.stop()
    assert good.ended_well


async def test_each_starts_in_the_folder_of_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad.toml").write_text("[scheduler]\nlease_s = -1\n")
    monkeypatch.chdir(tmp_path)
    bad = Service("bad", [*QUICK, "--config", "bad.toml"], Path("bad.log"))
    with pytest.raises(StartupError, match=r"scheduler\.lease_s"):
        await bad.start(HANG_S)


async def test_a_start_needs_no_room_for_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "full"))  # no file can be made there
    bad = service(tmp_path, "bad", MILLRACE_SCHEDULER__LEASE_S="-1")
    with pytest.raises(StartupError, match=r"scheduler\.lease_s"):
        await bad.start(HANG_S)


def open_pipes(pid: int) -> set[str]:
    """Returns the names of the pipes and sockets that the process has open."""
    names = set()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            names.add(os.readlink(f"/proc/{pid}/fd/{fd}"))
    return {name for name in names if name.startswith(("pipe:", "socket:"))}


async def test_a_fork_has_no_files_of_its_siblings(tmp_path: Path) -> None:
    made = [service(tmp_path, name) for name in ("one", "two", "three")]
    for one in made:
        await one.start(HANG_S)
    pids = [one.process.pid for one in made if one.process is not None]
    pipes = [open_pipes(pid) for pid in pids]
    assert pipes[0]
    assert all(pipes[0].isdisjoint(others) for others in pipes[1:])
    await asyncio.gather(*(one.stop() for one in made))


async def test_services_end_with_their_fork_server_and_start_by_another(tmp_path: Path) -> None:
    one = service(tmp_path)
    await one.start(HANG_S)
    assert one.process is not None
    first = fork_server()
    first.kill()
    assert await one.process.wait() == -signal.SIGTERM
    await one.start(HANG_S)
    assert fork_server().pid != first.pid
    await one.stop()
    assert one.ended_well


async def test_a_start_that_is_given_up_leaves_no_process(tmp_path: Path) -> None:
    one = service(tmp_path)
    await one.start(HANG_S)  # the server is there
    await one.stop()
    before = {child.pid for child in fork_server().children()}
    starting = asyncio.create_task(one.launch())
    await asyncio.sleep(0)  # it waits for the process id
    starting.cancel()
    await asyncio.wait([starting])
    assert starting.cancelled()
    assert {child.pid for child in fork_server().children()} <= before


def test_services_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PARENT, str(tmp_path / "log"), *QUICK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))  # readable once the process has ended
        parent.kill()
    try:
        assert select.select([child], [], [], HANG_S)[0]
    finally:
        os.close(child)


@pytest.mark.parametrize(
    ("last", "status", "error"),
    [
        ("pass", 0, ""),
        ("sys.exit()", 0, ""),
        ("sys.exit(3)", 3, ""),
        ("sys.exit('no')", 1, "no"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
    ],
)
def test_an_end_leaves_out_nothing_but_the_modules(last: str, status: int, error: str) -> None:
    command = [sys.executable, "-c", ENDING.format(last=last)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert ended.returncode == status
    assert ended.stdout.split() == ["main", "thread", "registered"]
    assert ended.stderr.strip().rpartition("\n")[2] == error
