"""A process that can't start the threads of its libraries says so, and ends."""

from __future__ import annotations

import os
import subprocess
import sys

from millrace.thread_limit import WANTED, check_threads, startable_threads

#: Leaves room for the stacks of some threads. Root may start any number of processes: a limit of
#: memory fails a thread by the same error as a limit of processes.
_LEAVE_ROOM = """
import resource, threading
threading.stack_size(8 << 20)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20),) * 2)
"""
_SERVE = f"""
import uvloop
from millrace.cli.process import run_async
import millrace.file_limit, millrace.thread_limit
{_LEAVE_ROOM}
async def serve():
    print("serves")
run_async(serve())
"""


def test_a_process_without_limits_can_start_all() -> None:
    assert startable_threads() == WANTED
    check_threads()


def test_the_threads_of_the_test_are_gone() -> None:
    count = "import threading\nfrom millrace.thread_limit import startable_threads\n"
    count += "startable_threads()\nprint(threading.active_count())"
    command = [sys.executable, "-c", count]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == "1\n"


def test_a_service_that_can_start_too_few_ends_with_one_line() -> None:
    one_arena = {**os.environ, "MALLOC_ARENA_MAX": "1"}  # one a thread would need more than stacks
    command = [sys.executable, "-c", _SERVE]
    found = subprocess.run(command, capture_output=True, text=True, env=one_arena)
    assert (found.returncode, found.stdout) == (1, "")
    (line,) = found.stderr.splitlines()
    start, _, rest = line.partition(" more threads and needs 64; raise the limit of processes: ")
    assert start.startswith("millrace: this process can start ") and rest.startswith("`ulimit -u`")
    assert 5 < int(start.rpartition(" ")[2]) < WANTED
