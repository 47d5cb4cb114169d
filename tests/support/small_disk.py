"""A disk of a few MiB, which a test fills."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

DISK_BYTES = 16 << 20
CHUNK = bytes(1 << 12)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """Mounts a tmpfs of `DISK_BYTES` on a new folder; skips the test where that is not allowed."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command to make a small disk")
    if done.returncode:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def filled(disk: Path) -> Iterator[Callable[[], None]]:
    """No byte is free on the disk inside the block; the function fills what became free again."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:

        def fill() -> None:
            with suppress(OSError):
                while True:
                    file.write(CHUNK)
            assert os.statvfs(disk).f_bavail == 0

        fill()
        try:
            yield fill
        finally:
            path.unlink()
            file.truncate()
