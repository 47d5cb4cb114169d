"""How many files this process may have open: every connection is one.

A shell's usual limit is 1,024, which suits programs that wait by select(2). A process may raise it
to a hard limit, which is far higher.
"""

from __future__ import annotations

import contextlib
import resource
from typing import Final

#: No more is asked for: a child process may close every number up to its limit.
WANTED: Final = 1 << 16
#: What clients leave for connections to Redis and to other services, and for files.
RESERVED: Final = 256


def raise_file_limit() -> int:
    """Raises the limit of open files to WANTED, or as far as this process may; returns it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED if hard == resource.RLIM_INFINITY else min(WANTED, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # of a sandbox, or of macOS
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    return file_limit()


def file_limit() -> int:
    """Returns how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return WANTED if soft == resource.RLIM_INFINITY else soft


def most_clients(files: int) -> int:
    """Returns how many clients may be connected where a process may open so many files."""
    return max(files - RESERVED, files // 2)
