"""The times that Linux counts for threads."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from threading import Thread

import pytest

from millrace.bench.common.thread_times import (
    ThreadTimes,
    busiest,
    process_ran_s,
    thread_times,
)


def test_a_thread_that_computes_runs() -> None:
    before, begun_s = thread_times(os.getpid()), time.thread_time()
    while time.thread_time() < begun_s + 0.2:
        pass
    after = thread_times(os.getpid())
    own = os.getpid()  # of the main thread, too
    assert 0.1 < after[own].ran_s - before[own].ran_s < 5.0
    assert after[own].waited_s >= before[own].waited_s


def test_a_process_has_run_for_the_time_of_all_its_threads() -> None:
    def compute() -> None:
        begun_s = time.thread_time()
        while time.thread_time() < begun_s + 0.1:
            pass

    thread = Thread(target=compute)
    thread.start()
    thread.join()
    before_s = time.process_time()
    found_s = process_ran_s(os.getpid())
    assert 0.1 < before_s <= found_s <= time.process_time()


def test_a_process_that_has_ended_runs_no_more() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    with pytest.raises(OSError, match="Invalid argument"):
        process_ran_s(child.pid)


def test_times_are_in_seconds_and_what_cannot_be_read_is_left_out(tmp_path) -> None:
    for thread, text in (("7", "1500000000 250000000 3"), ("8", "unreadable")):
        folder = tmp_path / "5" / "task" / thread
        folder.mkdir(parents=True)
        (folder / "schedstat").write_text(text)
    assert thread_times(5, tmp_path) == {7: ThreadTimes(ran_s=1.5, waited_s=0.25)}
    assert thread_times(6, tmp_path) == {}


def test_the_busiest_thread_ran_longest() -> None:
    def times(ran_s: float) -> ThreadTimes:
        return ThreadTimes(ran_s=ran_s, waited_s=0.0)

    assert busiest([{1: times(2.0), 2: times(0.5)}, {1: times(3.0), 2: times(3.5)}]) == 2
    assert busiest([]) is None
