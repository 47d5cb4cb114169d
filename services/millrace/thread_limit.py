"""How many threads this process may still start.

Libraries end the process where they can't start a thread (gRPC by a segmentation fault), and do not
say why.
"""

from __future__ import annotations

import threading
from typing import Final

from millrace.core.errors import MillraceError

#: Of gRPC, UCX, torch and the event loop's own pool: on 2 cores a service has about 20.
WANTED: Final = 64
ADVICE: Final = (
    "raise the limit of processes: `ulimit -u`, TasksMax of systemd, --pids-limit of a container, "
    "podPidsLimit of a kubelet"
)


def startable_threads() -> int:
    """Returns how many more threads can start now, up to WANTED: starts them, and ends them."""
    may_end = threading.Event()
    waiting: list[threading.Thread] = []
    try:
        for _ in range(WANTED):
            thread = threading.Thread(target=may_end.wait, daemon=True)
            thread.start()
            waiting.append(thread)
    except RuntimeError:  # of Python, for EAGAIN
        pass
    finally:
        may_end.set()
        for thread in waiting:
            thread.join()
    return len(waiting)


def check_threads() -> None:
    """Raises MillraceError if this process can't start WANTED more threads now."""
    if (found := startable_threads()) < WANTED:
        raise MillraceError(
            f"this process can start {found} more threads and needs {WANTED}; {ADVICE}"
        )
