"""Finds the ranks and later stages of an instance among its processes."""

from __future__ import annotations

import psutil


def forked_child(pid: int) -> int:
    """Returns the process id of the first child that the instance's fork server made."""
    for process in psutil.Process(pid).children():
        if any("forkserver" in word for word in process.cmdline()):
            for child in process.children():
                return child.pid
    raise AssertionError(f"process {pid} has neither ranks nor later stages")
