"""The cores and the memory that a container leaves this process.

A container's limits are those of control groups (Linux's cgroups(7), its admin-guide/cgroup-v2.rst
and cgroup-v1/memory.rst): a quota of CPU time, which no affinity shows, and bytes of memory, which
/proc/meminfo does not know. The limits of a group hold for all groups below it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

#: Version 1 writes a number near 2^63 where there is no limit.
_NO_LIMIT: Final = 1 << 60


def usable_cores(root: Path = Path("/")) -> int:
    """Returns how many threads of this process can run all the time, at least 1: the cores of its
    affinity, and no more than its quota of CPU time pays for. `root` is where the files begin.
    """
    cores = len(os.sched_getaffinity(0))
    shares = [
        share
        for group in _groups(root, "cpu")
        if (share := _share(_words(group / "cpu.max") or _quota_of_version_1(group))) is not None
    ]
    return max(1, min([cores, *map(int, shares)]))


def spare_bytes(root: Path = Path("/")) -> int | None:
    """Returns the bytes of memory that the limits leave; None without a limit.

    Cached files count as spare as far as the kernel would drop them first. `root` is where the
    files begin.
    """
    left = [
        bytes_left
        for group in _groups(root, "memory")
        for names in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        )
        if (bytes_left := _left(group, *names)) is not None
    ]
    return min(left, default=None)


def _left(group: Path, limit: str, used: str, cached: str) -> int | None:
    most, now = (_number(_words(group / name)) for name in (limit, used))
    if most is None or now is None or most >= _NO_LIMIT:
        return None
    words = _words(group / "memory.stat")
    cache = dict(zip(words[::2], words[1::2], strict=False))
    return max(0, most - now + int(cache.get(cached, 0)))


def _share(quota: list[str]) -> float | None:
    """Returns the cores that a quota pays for, given as its time and its period; None: all."""
    if len(quota) < 2 or (time := _number(quota)) is None:
        return None
    return time / int(quota[1])


def _quota_of_version_1(group: Path) -> list[str]:
    return [*_words(group / "cpu.cfs_quota_us"), *_words(group / "cpu.cfs_period_us")]


def _number(words: list[str]) -> int | None:
    """Returns the first word as a number; None for "max", -1 and nothing."""
    return int(words[0]) if words and words[0].isdecimal() else None


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:  # no such control group, or no such file in it
        return []


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of this process's control group and of those above it that this process
    sees, for the hierarchies that may have the controller.
    """
    paths = _own_groups(root)
    for mount_root, folder, kind, options in _mounts(root):
        path = paths.get("" if kind == "cgroup2" else controller)
        if path is None or (kind == "cgroup" and controller not in options):
            continue
        # A container sees its own group as the root, and may be told the path outside.
        below = path.removeprefix(mount_root.rstrip("/")).strip("/")
        group = root / folder.lstrip("/") / below
        if not group.is_dir():
            group = root / folder.lstrip("/")
        top = root / folder.lstrip("/")
        yield group
        yield from (parent for parent in group.parents if parent.is_relative_to(top))


def _own_groups(root: Path) -> dict[str, str]:
    """Returns this process's control group by controller; of version 2 by ""."""
    found: dict[str, str] = {}
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        found |= dict.fromkeys(controllers.split(","), path)
    return found


def _mounts(root: Path) -> Iterator[tuple[str, str, str, list[str]]]:
    """Yields root, folder, kind and options of every mounted hierarchy (proc_pid_mountinfo(5))."""
    for line in _lines(root / "proc/self/mountinfo"):
        own, _, others = line.partition(" - ")
        fields, (kind, _, options) = own.split(), others.split()[:3]
        if kind in ("cgroup", "cgroup2"):
            yield fields[3], fields[4], kind, options.split(",")


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:  # no Linux, or /proc is hidden
        return []
