"""Every service is harmed in every way in every phase of a request: no answer differs.

Three tables say what is tried: the phases of a request, the faults of a process, and for every
service the phases in which it has a part. In all of them the promise is the same: every answer has
the tokens of the undisturbed run, those beside it and one that comes after the fault too, and then
the fleet is as it was. The stacks' ends raise what any process found left of a request.

Left out, as it has no meaning:

- decode while a request is queued: it knows nothing of the request;
- prefill once the answer decodes: it holds nothing of the request any more.

Of a spread prompt, nothing is reported as computed before all of it is: its phases are those before
prefill and after it.

KV goes between the processes of one machine by shared memory, which no partition reaches. What
partitions do to the store and the scheduler is in `test_partitions.py`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import millrace.profiles
from support import fault_scene
from support.fault_scene import Scene, endure
from support.fault_traffic import scene_of

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

#: Groups are planned by their times; these are of GPUs.
PROFILE = Path(millrace.profiles.__file__).parent / "llama3-8b-a100-tp1.json"
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {"prefill": 2, "decode": 2, "settings": ["scheduler.planner=least_queue"]},
    "groups": {
        **{"prefill": 2, "decode": 2},
        "settings": [
            *("scheduler.planner=fixed_sp", "scheduler.fixed_sp=2"),
            f"engine.profile={PROFILE}",
        ],
    },
    "spread": {
        **{"prefill": 2, "decode": 2, "kvp": 2},
        "settings": ["scheduler.planner=least_queue", "scheduler.max_kv_tokens_per_worker=256"],
    },
}

PHASES = {
    "queued": fault_scene.queued,
    "mid-prefill": fault_scene.mid_prefill,
    "mid-ring": fault_scene.mid_ring,
    "mid-transfer": fault_scene.mid_transfer,
    "mid-decode": fault_scene.mid_decode,
    "mid-tool-call": fault_scene.mid_tool_call,
}
FAULTS = {
    "SIGKILL": fault_scene.killed,
    "SIGSTOP": fault_scene.paused,
    "restart": fault_scene.restarted,
    "slow CPU": fault_scene.starved,
}
#: The store alone has data to lose.
FAULTS_OF_STORE = {**FAULTS, "loss of its data": fault_scene.emptied}
#: The phases of which the services know, by layout.
MATRIX = {
    "alone": {
        "prefill": ("queued", "mid-prefill", "mid-transfer"),
        "decode": ("mid-prefill", "mid-transfer", "mid-decode", "mid-tool-call"),
        "scheduler": ("queued", "mid-prefill", "mid-transfer", "mid-decode", "mid-tool-call"),
        "proxy": ("queued", "mid-prefill", "mid-transfer", "mid-decode", "mid-tool-call"),
        "store": ("queued", "mid-prefill", "mid-transfer", "mid-decode", "mid-tool-call"),
    },
    "groups": dict.fromkeys(("prefill", "decode", "scheduler", "proxy", "store"), ("mid-ring",)),
    "spread": {
        "decode": ("mid-decode", "mid-tool-call"),
        "kvp": ("queued", "mid-decode", "mid-tool-call"),
    },
}
CASES = [
    pytest.param(layout, phase, service, fault, id=f"{layout}, {phase}, {service}, {fault}")
    for layout, services in MATRIX.items()
    for service, phases in services.items()
    for phase in phases
    for fault in (FAULTS_OF_STORE if service == "store" else FAULTS)
]

TARGETS = {"mid-decode": "long answer", "mid-tool-call": "tool call"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(request, tmp_path_factory) -> AsyncIterator[Scene]:
    """A stack of a layout, undisturbed until now."""
    folder = tmp_path_factory.mktemp("faults") / "model"
    async with scene_of(folder, **LAYOUTS[request.param]) as made:
        yield made


@pytest.mark.parametrize(("scene", "phase", "service", "fault"), CASES, indirect=["scene"])
async def test_no_answer_differs(scene: Scene, phase: str, service: str, fault: str) -> None:
    target = TARGETS.get(phase, "long prompt")
    pause_s = await endure(scene, target, PHASES[phase], service, FAULTS_OF_STORE[fault])
    print(f"{phase}, {service}, {fault}: longest pause {pause_s:.2f} s")
