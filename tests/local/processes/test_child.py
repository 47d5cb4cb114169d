"""Children end with their parent, and start without a fork that other libraries' handlers see."""

from __future__ import annotations

import ast
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import millrace
from millrace.local.processes.child import ending_with_this
from support.deadlines import HANG_S

SLEEP = [
    sys.executable,
    "-I",
    "-S",
    "-c",
    "import time; print('here', flush=True); time.sleep(600)",
]

PARENT = """
import signal, subprocess, sys, time
from millrace.local.processes.child import ending_with_this
child = subprocess.Popen(
    ending_with_this(sys.argv[1:], signal.SIGTERM), stdout=subprocess.PIPE, text=True
)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(600)
"""


def test_a_child_ends_when_its_parent_is_killed() -> None:
    command = [sys.executable, "-c", PARENT, *SLEEP]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = os.pidfd_open(int(parent.stdout.readline()))  # readable once the process has ended
        parent.kill()
    try:
        assert select.select([child], [], [], HANG_S)[0]
    finally:
        os.close(child)


def test_a_child_whose_parent_is_gone_already_does_not_begin() -> None:
    command = ending_with_this(SLEEP, signal.SIGTERM)
    orphan = [str(os.getppid()) if word == str(os.getpid()) else word for word in command]
    ended = subprocess.run(orphan, capture_output=True, text=True, timeout=HANG_S)
    assert (ended.returncode, ended.stdout) == (0, "")


def test_nothing_runs_between_fork_and_exec() -> None:
    """With `preexec_fn` Python forks, and gRPC's fork handlers end some children."""
    for path in Path(millrace.__file__).parent.rglob("*.py"):
        nodes = ast.walk(ast.parse(path.read_text("utf-8")))
        assert "preexec_fn" not in {n.arg for n in nodes if isinstance(n, ast.keyword)}, path
