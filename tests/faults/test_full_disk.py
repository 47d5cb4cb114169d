"""The disk of all services is full: no answer differs, files are refused, and all goes on after.

A small tmpfs holds all that services write: logs, traces, the scheduler's recording, the bytes of
files, the cache of profiles. The store writes nothing to disk.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from support.fault_scene import LATE, Scene, endure, killed, mid_decode, mid_prefill
from support.fault_traffic import scene_of
from support.live_stack import eventually

pytestmark = pytest.mark.slow

DISK_BYTES = 16 << 20
CHUNK = bytes(1 << 12)
FILE = {"file": ("a.jsonl", b'{"custom_id": "a"}\n' * 1000)}


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk for all that the stack writes, its folder of logs too."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command to make a small disk")
    if done.returncode:
        pytest.skip(f"no small disk can be mounted here: {done.stderr.strip()}")
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@contextmanager
def filled(disk: Path) -> Iterator[None]:
    """No byte is free on the disk inside the block."""
    path = disk / "filler"
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(CHUNK)
        except OSError:
            pass
        assert os.statvfs(disk).f_bavail == 0
        try:
            yield
        finally:
            path.unlink()
            file.truncate()


async def upload(scene: Scene) -> int:
    """The status of an upload."""
    data = {"purpose": "batch"}
    response = await scene.client.post("/v1/files", data=data, files=FILE)
    if response.status_code >= 400:
        assert response.json()["error"]["message"], response.text
    return response.status_code


async def test_a_full_disk_costs_no_answer(disk: Path, tmp_path: Path) -> None:
    traces, recording = disk / "traces", disk / "recording"
    settings = [
        f"telemetry.trace_folder={traces}",
        "telemetry.trace_ratio=1",
        f"files.url={disk / 'files'}",
        f"engine.profile_cache={disk / 'profiles'}",
    ]
    layout = {"prefill": 2, "decode": 2, "record": recording, "settings": settings}
    async with scene_of(tmp_path / "model", **layout) as scene:
        assert await upload(scene) == 200
        with filled(disk):
            for target, phase, service in (
                ("long prompt", mid_prefill, "prefill"),
                ("long answer", mid_decode, "decode"),
            ):
                await endure(scene, target, phase, service, killed)
            assert await upload(scene) in (503, 507)
        assert await upload(scene) == 200
        written = sum(path.stat().st_size for path in traces.glob("*.jsonl"))
        scene.send(LATE)
        await scene.end()
        await eventually(
            lambda: sum(path.stat().st_size for path in traces.glob("*.jsonl")) > written,
            what="traces are written again",
        )
