"""Runs a command on a busy machine: `python tests/busy.py COMMAND ...` (`make test-busy`).

One process keeps a core busy, another writes to disk, and the command's processes stand nearly
still for up to 2 s, one after the other: each gets the CPU only when nobody else wants it. A
machine that many share does all three to tests. Ends with the command's status.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import psutil

SPIN = "while True: pass"
WRITE = """
import os, sys
while True:
    with open(sys.argv[1], "wb") as file:
        for _ in range(256):
            file.write(os.urandom(1 << 20))
            os.fsync(file.fileno())
"""
LEAST_STALL_S, MOST_STALL_S, MOST_PAUSE_S = 0.2, 2.0, 0.3


@contextmanager
def busy() -> Iterator[None]:
    """Keeps a core and the disk busy inside the block."""
    python = (sys.executable, "-S", "-c")
    with tempfile.NamedTemporaryFile(prefix="millrace-busy-") as file:
        others = [
            subprocess.Popen([*python, SPIN]),
            subprocess.Popen([*python, WRITE, file.name]),
        ]
        try:
            yield
        finally:
            for one in others:
                one.kill()
                one.wait()


def schedule(process: psutil.Process, policy: int) -> None:
    """Sets the policy of all threads of a process, unless it has ended."""
    with suppress(psutil.Error):
        for thread in process.threads():
            with suppress(ProcessLookupError):
                os.sched_setscheduler(thread.id, policy, os.sched_param(0))


def stall_one(of: psutil.Process, draw: random.Random) -> None:
    """Stalls a random process of a tree."""
    with suppress(psutil.NoSuchProcess):
        process = draw.choice([of, *of.children(recursive=True)])
        schedule(process, os.SCHED_IDLE)
        try:
            time.sleep(draw.uniform(LEAST_STALL_S, MOST_STALL_S))
        finally:
            schedule(process, os.SCHED_OTHER)


def main(command: list[str]) -> int:
    draw = random.Random(0)
    with busy(), subprocess.Popen(command) as running:
        tree = psutil.Process(running.pid)
        while running.poll() is None:
            stall_one(tree, draw)
            time.sleep(draw.uniform(0, MOST_PAUSE_S))
        return running.returncode


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except PermissionError:  # Linux lets users lower a process's claim, and only root raise it
        sys.exit("stalls need the right to raise a process's priority (CAP_SYS_NICE, RLIMIT_NICE)")
