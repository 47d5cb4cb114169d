"""Prefill groups as processes that compute prompts as planned."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from importlib import resources

import numpy as np
import psutil
import pytest
import pytest_asyncio

from millrace import profiles
from millrace.core.scheduler.planning.plan import PlannedChunk
from millrace.profiler.groups.conductor import Conductor, ConductorError, FleetOptions
from support.tiny_models import model_folder

SETTINGS = (
    "engine.device=cpu",
    "engine.dtype=float32",
    "engine.threads=1",
    "engine.kv_bytes=8388608",
    "engine.max_chunk_tokens=256",
    f"engine.profile={resources.files(profiles) / 'llama3-8b-a100-tp1.json'}",
)


def options(prefill: int = 2, **changes: object) -> FleetOptions:
    given = {"model": str(model_folder("llama")), "prefill": prefill, "settings": SETTINGS}
    return FleetOptions(**{**given, **changes})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def conductor() -> AsyncIterator[Conductor]:
    async with Conductor(options()) as started:
        yield started


@pytest.mark.asyncio(loop_scope="module")
async def test_a_plan_of_growing_groups_is_computed_as_planned(conductor: Conductor) -> None:
    plan = [PlannedChunk(500, (1,)), PlannedChunk(900, (1, 0))]
    before = await conductor.costs()
    run = await conductor.run(plan, np.arange(1400, dtype=np.int32) % 50 + 8)
    spent = [now - then for now, then in zip(await conductor.costs(), before, strict=True)]

    alone, together = run.chunks
    assert (alone.ring_wait_s, alone.history_wait_s) == (0.0, 0.0)
    assert 0 < together.ring_wait_s + together.history_wait_s < together.compute_s
    # The news of the start, of the token and of the landing come on three streams, in any order.
    assert run.started_s > 0 and run.compute_s < run.landed_s
    assert alone.compute_s + together.compute_s == run.compute_s < run.ttft_s
    assert all(one.ring_bytes > 0 and one.compute_s > 0 for one in spent)
    assert all(one.handshake_s > 0 for one in spent)
    assert sum(one.sent_bytes for one in spent) % 1400 == 0  # each token's K/V, once


@pytest.mark.asyncio(loop_scope="module")
async def test_an_instance_tells_the_times_of_groups_that_its_profile_has(
    conductor: Conductor,
) -> None:
    latency = conductor.registration.latency
    assert latency is not None
    assert latency.degrees == (1, 2, 4, 8, 16)
    shipped = profiles.load_profile("llama3-8b-a100-tp1").prefill.by_sp
    assert latency.by_sp[4].points == shipped[4].points


@pytest.mark.asyncio(loop_scope="module")
async def test_one_prompt_after_another(conductor: Conductor) -> None:
    for group in ((0,), (1,), (0, 1), (1, 0)):
        run = await conductor.run([PlannedChunk(40, group)])
        assert len(run.chunks) == 1 and run.compute_s > 0


@pytest.mark.asyncio(loop_scope="module")
async def test_a_prompt_that_fits_nowhere_is_an_error_and_leaves_nothing(
    conductor: Conductor,
) -> None:
    # Decode's or prefill's error, whichever refuses first.
    refused = r"12501 KV pages may be wanted|needs \d+ KV pages; there are"
    with pytest.raises(ConductorError, match=refused):
        await conductor.run([PlannedChunk(200_000, (0, 1))])
    await conductor.run([PlannedChunk(2000, (0, 1))])


@pytest.mark.slow
async def test_a_dead_instance_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted, own = options(), psutil.Process()
    before = set(own.children(recursive=True))
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        # The conductor notices its end, or the other member of its group reports it.
        with pytest.raises(ConductorError, match=r"prefill-1(-\d+)? is gone"):
            async with Conductor(wanted) as conductor:
                started = set(own.children(recursive=True)) - before
                # A forked service has its whole command line as its name.
                lines = {one: " ".join(one.cmdline()).split() for one in started}
                (process,) = (one for one, words in lines.items() if "prefill-1" in words)
                running = asyncio.create_task(conductor.run([PlannedChunk(10_000, (0, 1))]))
                await asyncio.sleep(0.1)
                process.kill()
                await running
        assert not [name for name in os.listdir(folder) if name.startswith("millrace-")]
