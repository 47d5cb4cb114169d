"""Starts child processes that always end with their parent process."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence

# A fresh interpreter asks the kernel for the signal (PR_SET_PDEATHSIG, 1, see prctl(2)), which
# outlives the exec, then becomes the command. It checks the parent afterwards, as the parent may
# have died just before. Not by `preexec_fn`: with it Python forks, and between fork and exec other
# libraries' handlers run, gRPC's among them, which ends some children.
_BECOME = """
import ctypes, os, sys
parent, number, *command = sys.argv[1:]
if ctypes.CDLL(None, use_errno=True).prctl(1, int(number), 0, 0, 0) != 0:
    sys.exit("prctl: " + os.strerror(ctypes.get_errno()))
if os.getppid() == int(parent):
    os.execv(command[0], command)
"""


def ending_with_this(command: Sequence[str], number: signal.Signals) -> list[str]:
    """Returns the command line that runs `command` as a child of this process and has the kernel
    send it `number` when this process ends.

    command: its first item is the path of a program. Linux sends the signal when the *thread* that
    started the child ends: start it from a thread that lives as long as the child should.
    """
    parent = str(os.getpid())
    return [sys.executable, "-I", "-S", "-c", _BECOME, parent, str(int(number)), *command]
