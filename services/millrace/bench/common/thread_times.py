"""The time for which processes and threads ran, or waited for a core, as Linux counts it: in ns,
where psutil has steps of 10 ms.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

_NS = 1e-9
_SCHEDULED = 2  # CPUCLOCK_SCHED of the kernel's clock ids


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadTimes:
    """Seconds since the thread's start: on a core, and ready to run without one."""

    ran_s: float
    waited_s: float


def thread_times(pid: int, proc: Path = Path("/proc")) -> dict[int, ThreadTimes]:
    """Returns the times of a process's threads by their id; none where the kernel counts none, or
    once the process has ended.
    """
    found = {}
    for thread in (proc / str(pid) / "task").glob("*/schedstat"):
        try:
            ran_ns, waited_ns, _ = map(int, thread.read_text().split())
        except (OSError, ValueError):
            continue
        found[int(thread.parent.name)] = ThreadTimes(ran_s=ran_ns * _NS, waited_s=waited_ns * _NS)
    return found


def process_ran_s(pid: int) -> float:
    """Returns the seconds that all threads of a process have run, those that ended included.

    Raises OSError once the process has ended.
    """
    return time.clock_gettime(~pid << 3 | _SCHEDULED)  # the id that clock_getcpuclockid(3) gives


def busiest(samples: Iterable[dict[int, ThreadTimes]]) -> int | None:
    """Returns the thread that ran longest; None without any."""
    ran_s: dict[int, float] = {}
    for sample in samples:
        ran_s |= {thread: times.ran_s for thread, times in sample.items()}
    return max(ran_s, key=lambda thread: ran_s[thread], default=None)
