"""Starts the ranks and the later stages of an instance."""

from __future__ import annotations

import multiprocessing
import signal
from multiprocessing.context import ForkServerContext

#: What the fork server imports once, for every child: torch takes 2 s of CPU time.
_PRELOADED = ["millrace.engine.parallel.follower"]


def child_processes() -> ForkServerContext:
    """Returns the context of child processes: forks of one server, which uses neither threads nor
    a device. A child gets the environment that the first child of its instance got.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    return context


def ending(exitcode: int) -> str:
    """Says how a child process has ended."""
    if exitcode < 0:
        return f"killed by {signal.Signals(-exitcode).name}"
    return f"exit status {exitcode}"
