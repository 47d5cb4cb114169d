"""The faults of `millrace bench chaos`: which processes they find."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from millrace.bench.chaos.faults import KILL, STOP, Fault, followers, members, strike

ENDED_PID = 1 << 30  # above all that a system gives


@pytest.mark.parametrize("kind", [KILL, STOP])
async def test_a_process_that_has_just_ended_is_struck_by_nothing(kind: str) -> None:
    stack: Any = SimpleNamespace(redis_pid=ENDED_PID, redis_data=None)
    fault = Fault(kind=kind, target="store", pause_s=0, stop_s=0, draw=0)
    assert await strike(stack, fault) == ""


INSTANCE = """
import os, threading
wait = threading.Event().wait
for threads in (0, 1):  # one that only forks has one thread
    if not (pid := os.fork()):
        for _ in range(threads):
            threading.Thread(target=wait, daemon=True).start()
        print(os.getpid() if threads else "", flush=True)
        wait()
wait()
"""


def test_members_are_the_computing_processes_of_an_instance() -> None:
    command = [sys.executable, "-c", INSTANCE]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as instance:
        assert instance.stdout is not None
        said = sorted(instance.stdout.readline().strip() for _ in range(2))
        try:
            assert members(instance.pid) == [int(said[1])]
            assert len(followers(instance.pid)) == 2
            instance.kill()
            assert instance.wait() and len(followers(instance.pid)) == 2
        finally:
            subprocess.run(["kill", "-KILL", "--", f"-{instance.pid}"], check=True)
