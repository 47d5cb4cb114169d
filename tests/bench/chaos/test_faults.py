"""The faults of `millrace bench chaos`: which processes they find."""

from __future__ import annotations

import subprocess
import sys

from millrace.bench.chaos.faults import followers, members

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
