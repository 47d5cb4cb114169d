"""The disk of all services is full: no answer differs, files are refused, and all goes on after.

A small tmpfs holds all that services write: logs, traces, the scheduler's recording, the bytes of
files, the cache of profiles, the data of the store.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.fault_scene import LATE, Scene, endure, killed, mid_decode, mid_prefill
from support.fault_traffic import scene_of
from support.live_stack import eventually
from support.small_disk import filled, small_disk

pytestmark = pytest.mark.slow

FILE = {"file": ("a.jsonl", b'{"custom_id": "a"}\n' * 1000)}


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A disk for all that the stack writes, its folder of logs too."""
    with small_disk(tmp_path / "disk") as folder:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        yield folder


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
        with filled(disk) as fill:
            for target, phase, service in (
                ("long prompt", mid_prefill, "prefill"),
                ("long answer", mid_decode, "decode"),
            ):
                await endure(scene, target, phase, service, killed)
            fill()
            assert await upload(scene) in (503, 507)
        assert await upload(scene) == 200
        written = sum(path.stat().st_size for path in traces.glob("*.jsonl"))
        scene.send(LATE)
        await scene.end()
        await eventually(
            lambda: sum(path.stat().st_size for path in traces.glob("*.jsonl")) > written,
            what="traces are written again",
        )
