"""Limits of control groups, of both versions, as containers and plain machines show them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest

from millrace.container_limits import spare_bytes, usable_cores

V1_CPU, V1_MEMORY = "sys/fs/cgroup/cpu,cpuacct", "sys/fs/cgroup/memory"
V2 = "sys/fs/cgroup"


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))


def machine(root: Path, cgroup: str, mounts: list[str], files: Mapping[str, str]) -> Path:
    """Makes a machine's files below `root`; `mounts` has `ROOT FOLDER - KIND SOURCE OPTIONS`."""
    lines = [f"{40 + n} 31 0:29 {one}" for n, one in enumerate(mounts)]
    lines.append("23 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw")
    given = {**files, "proc/self/cgroup": cgroup, "proc/self/mountinfo": "\n".join(lines)}
    for name, text in given.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def v2(root: Path, path: str, files: Mapping[str, str]) -> Path:
    mount = f"/ /{V2} rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate"
    return machine(root, f"0::{path}\n", [mount], {f"{V2}/{k}": v for k, v in files.items()})


def v1(root: Path, path: str, seen: str, files: Mapping[str, str]) -> Path:
    """`path` is what the process is told, `seen` the group that its mounts begin at."""
    mounts = [
        f"{seen} /{V1_CPU} rw,relatime shared:8 - cgroup cgroup rw,cpu,cpuacct",
        f"{seen} /{V1_MEMORY} rw,relatime shared:9 - cgroup cgroup rw,memory",
        "/ /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw",
    ]
    groups = f"9:name=systemd:{path}\n5:memory:{path}\n4:cpu,cpuacct:{path}\n0::/\n"
    return machine(root, groups, mounts, files)


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max", 8), ("400000", 4), ("150000", 1), ("50000", 1), ("3200000", 8)],
)
def test_a_quota_pays_for_whole_cores_and_one_at_least(
    tmp_path: Path, quota: str, cores: int
) -> None:
    assert usable_cores(v2(tmp_path, "/", {"cpu.max": f"{quota} 100000\n"})) == cores


@pytest.mark.parametrize(("quota", "cores"), [("-1", 8), ("300000", 3)])
def test_a_quota_of_version_1(tmp_path: Path, quota: str, cores: int) -> None:
    files = {
        f"{V1_CPU}/cpu.cfs_quota_us": f"{quota}\n",
        f"{V1_CPU}/cpu.cfs_period_us": "100000\n",
    }
    assert usable_cores(v1(tmp_path, "/docker/1f", "/docker/1f", files)) == cores


def test_the_tightest_group_above_counts(tmp_path: Path) -> None:
    files = {
        "pod.slice/one/cpu.max": "max 100000\n",
        "pod.slice/one/memory.max": "max\n",
        "pod.slice/one/memory.current": "10\n",
        "pod.slice/cpu.max": "200000 100000\n",
        "pod.slice/memory.max": "1000\n",
        "pod.slice/memory.current": "400\n",
        "pod.slice/memory.stat": "anon 250\ninactive_file 150\nactive_file 0\n",
        "other.slice/memory.max": "1\n",
        "other.slice/memory.current": "1\n",
    }
    root = v2(tmp_path, "/pod.slice/one", files)
    assert usable_cores(root) == 2
    assert spare_bytes(root) == 1000 - 400 + 150


def test_a_container_that_is_told_a_path_outside_sees_its_own_group(tmp_path: Path) -> None:
    files = {"cpu.max": "100000 100000\n", "memory.max": "500\n", "memory.current": "600\n"}
    root = v2(tmp_path, "/../kubepods/pod1", files)
    assert usable_cores(root) == 1
    assert spare_bytes(root) == 0


@pytest.mark.parametrize(
    ("limit", "spare"), [("9223372036854771712", None), ("1000", 1000 - 700 + 20)]
)
def test_memory_of_version_1(tmp_path: Path, limit: str, spare: int | None) -> None:
    files = {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": "700\n",
        "memory.stat": "cache 90\ninactive_file 5\ntotal_inactive_file 20\n",
    }
    below = {f"{V1_MEMORY}/kubepods/{name}": text for name, text in files.items()}
    assert spare_bytes(v1(tmp_path, "/kubepods", "/", below)) == spare


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert usable_cores(tmp_path) == 8
    assert spare_bytes(tmp_path) is None


def test_this_machine_answers() -> None:
    assert 1 <= usable_cores() <= 8
    assert (spare_bytes() or 0) >= 0
