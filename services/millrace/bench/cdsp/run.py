"""Runs the measurements of `millrace bench cdsp` in order and makes the document."""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from millrace.bench.cdsp import groups as cdsp_groups
from millrace.bench.cdsp import live as cdsp_live
from millrace.bench.cdsp.command import Settings
from millrace.bench.cdsp.live import CDSP, PLANNERS, Mix, Served
from millrace.bench.common.machine_limits import describe_machine
from millrace.bench.common.models import LLAMA_27M, kv_bytes
from millrace.bench.common.options import Announce
from millrace.bench.common.random_model import write_random_model
from millrace.bench.transfer import ring
from millrace.container_limits import usable_cores
from millrace.core.config import EngineConfig
from millrace.core.cost.profile import Profile
from millrace.core.errors import ConfigError
from millrace.engine.assembly import open_engine
from millrace.profiler.fitting import Subject, build_profile, measured_alone
from millrace.profiler.groups.conductor import Conductor, FleetOptions
from millrace.profiler.groups.measure import measure_groups
from millrace.profiler.measure import Measured
from millrace.sim.workload.workload import plan


def resolved(settings: Settings) -> Settings:
    """Fills in the number of instances. Raises ConfigError for prompts that don't fit the KV."""
    token_bytes = kv_bytes(LLAMA_27M, 1, "float32")
    longest = max(
        *settings.lengths,
        settings.long_tokens,
        round(settings.chunk_tokens * (1 + max(settings.shares))),
    )
    # The pages of the prompt and the ring's two buffers, each with a layer's block.
    room = min(settings.kv_bytes // (2 * token_bytes), LLAMA_27M["max_position_embeddings"])
    if longest >= room:
        raise ConfigError(
            f"a prompt of {longest} tokens is too long for this model and "
            f"{settings.kv_bytes} bytes of KV; at most {room - 1}"
        )
    cores = usable_cores()
    instances = settings.instances or max(2, min(4, cores // settings.threads))
    return replace(settings, instances=instances)


async def run(settings: Settings, announce: Announce = lambda what: None) -> dict[str, Any]:
    """Measures and returns the document. Raises MillraceError for impossible settings."""
    begun_s = time.perf_counter()
    settings = resolved(settings)
    document: dict[str, Any] = {
        "benchmark": "cdsp",
        "settings": asdict(settings),
        "machine": describe_machine(),
    }
    with tempfile.TemporaryDirectory() as folder:
        model = write_random_model(Path(folder), LLAMA_27M)
        if "ring" in settings.parts:
            document["ring"] = await asyncio.to_thread(_ring, settings, announce)
        one = _one_instance(model, settings, announce) if "load" in settings.parts else None
        if settings.fleet:
            groups, profile = await _groups(model, settings, one, announce)
            document |= groups
            if profile is not None:
                path = Path(folder) / "profile.json"
                path.write_text(json.dumps(profile.to_json()))
                document["profile"] = profile.to_json()
                document["load"] = await _load(model, path, profile, settings, announce)
    document["took_s"] = time.perf_counter() - begun_s
    return document


def _engine_settings(settings: Settings) -> list[str]:
    return [
        "engine.device=cpu",
        "engine.dtype=float32",
        f"engine.threads={settings.threads}",
        f"engine.kv_bytes={settings.kv_bytes}",
        "engine.prefix_cache=off",  # every rate sends the same prompts
    ]


def _ring(settings: Settings, announce: Announce) -> list[dict[str, Any]]:
    rates = ring.measure(
        members=settings.ring_members,
        block_mib=settings.ring_mib,
        repeats=settings.ring_repeats,
        on_progress=lambda what: announce(f"ring: {what}"),
    )
    return [asdict(rate) for rate in rates]


def _one_instance(model: Path, settings: Settings, announce: Announce) -> tuple[Subject, Measured]:
    """Measures one instance alone, as `millrace profile` does."""
    announce("measuring a profile: operators")
    config = EngineConfig(
        device="cpu", dtype="float32", threads=settings.threads, kv_bytes=settings.kv_bytes
    )
    with closing(open_engine(model, config)) as engine:
        return measured_alone(
            engine,
            settings.operators_s,
            threads=settings.threads,
            max_chunk_tokens=config.max_chunk_tokens,
        )


async def _groups(
    model: Path, settings: Settings, one: tuple[Subject, Measured] | None, announce: Announce
) -> tuple[dict[str, Any], Profile | None]:
    """Runs the conductor's measurements; also returns the profile if the load needs one."""
    found: dict[str, Any] = {}
    profile = None
    fleet = FleetOptions(
        model=str(model),
        prefill=settings.fleet,
        settings=[*_engine_settings(settings), "engine.profile=none"],
    )
    async with Conductor(fleet, announce) as conductor:
        if one is not None:
            announce("measuring a profile: one instance and groups")
            subject, measured = one
            groups = await measure_groups(
                conductor.run,
                (1, *settings.group_degrees),
                longest=settings.long_tokens,
                budget_s=settings.profile_s,
                cores=usable_cores(),
            )
            profile = build_profile(subject, measured, groups)
        if "sp" in settings.parts:
            found["sp"] = await cdsp_groups.scaling(
                conductor, settings.lengths, settings.degrees, settings.rounds, announce
            )
            found["handshake"] = cdsp_groups.handshakes(found["sp"])
        if "balancing" in settings.parts:
            found["balancing"] = await cdsp_groups.balancing(
                conductor,
                settings.chunk_tokens,
                settings.shares,
                settings.growths,
                settings.rounds,
                announce,
            )
    return found, profile


async def _load(
    model: Path, profile_path: Path, profile: Profile, settings: Settings, announce: Announce
) -> dict[str, Any]:
    """Runs every planner at every load, live and simulated; TTFT over that of CDSP."""
    served = Served(
        model=str(model),
        profile_path=profile_path,
        instances=settings.instances,
        threads=settings.threads,
        token_ids=(0, LLAMA_27M["vocab_size"] - 1),
        settings=_engine_settings(settings),
    )
    mix = Mix(
        short_tokens=settings.short_tokens,
        long_tokens=settings.long_tokens,
        requests=settings.requests,
        seed=settings.seed,
    )
    capacity_rps = mix.capacity_rps(profile, settings.instances)
    rates_rps = [load * capacity_rps for load in settings.loads]
    live = {
        planner: await cdsp_live.live(planner, served, mix, rates_rps, announce)
        for planner in PLANNERS
    }
    beyond_s = max(live[CDSP]["alone_s"] - profile.prefill.isolated_s(mix.short_tokens), 0.0)
    runs = []
    for number, (load, rate_rps) in enumerate(zip(settings.loads, rates_rps, strict=True)):
        requests = list(plan(mix.at(rate_rps)))
        announce(f"simulating {rate_rps:.2g} requests/s")
        in_sim = {
            planner: cdsp_live.simulated(planner, served, profile, requests, beyond_s)
            for planner in PLANNERS
        }
        in_life = {planner: live[planner]["runs"][number] for planner in PLANNERS}
        runs.append(
            {
                "load": load,
                "rate_rps": rate_rps,
                "live": _over_cdsp(in_life),
                "simulated": _over_cdsp(in_sim),
            }
        )
    return {
        "instances": settings.instances,
        "degrees": [1, *settings.group_degrees],
        "capacity_rps": capacity_rps,
        "beyond_prefill_s": beyond_s,
        "alone_s": {planner: found["alone_s"] for planner, found in live.items()},
        "runs": runs,
    }


def _over_cdsp(figures: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """Returns each planner's mean and p99 over CDSP's."""
    ours = figures[CDSP]
    return {
        planner: {
            **own,
            "mean_ratio": own["mean_s"] / ours["mean_s"],
            "p99_ratio": own["p99_s"] / ours["p99_s"],
        }
        for planner, own in figures.items()
    }
