"""Runs the measurements of `millrace bench cdsp` in order and makes the document."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from millrace.bench.cdsp import groups as cdsp_groups
from millrace.bench.cdsp import live as cdsp_live
from millrace.bench.cdsp.live import CDSP, PLANNERS, Mix, Served
from millrace.bench.common.choices import CDSP_PARTS
from millrace.bench.common.machine_limits import describe_machine
from millrace.bench.common.random_model import LLAMA_27M, write_random_model
from millrace.bench.transfer import ring
from millrace.core.config import EngineConfig
from millrace.core.cost.profile import Profile
from millrace.core.errors import ConfigError
from millrace.engine.assembly import open_engine
from millrace.profiler.fitting import Subject, build_profile
from millrace.profiler.groups.conductor import Conductor, FleetOptions
from millrace.profiler.groups.measure import measure_groups
from millrace.profiler.measure import Measured, measure
from millrace.profiler.workload import Workload
from millrace.sim.workload.workload import plan

Told = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """parts: of `CDSP_PARTS`. threads: per instance. lengths, degrees: prompts on groups of these
    sizes, `rounds` times each. chunk_tokens, shares: a chunk, its history as shares of it.
    instances: the number under load, 0: as many as have cores of their own, 2 to 4; loads: as
    shares of their capacity. operators_s, profile_s: seconds of measuring in this process, and
    live.
    """

    parts: tuple[str, ...] = CDSP_PARTS
    threads: int = 1
    kv_bytes: int = 1 << 29
    lengths: tuple[int, ...] = (512, 1024, 2048, 4096)
    degrees: tuple[int, ...] = (1, 2, 3, 4)
    rounds: int = 3
    chunk_tokens: int = 768
    shares: tuple[float, ...] = (0.25, 1.0, 2.0)
    growths: tuple[tuple[int, int], ...] = cdsp_groups.GROWTHS
    ring_mib: tuple[int, ...] = (16,)
    ring_members: tuple[int, ...] = (2, 4)
    ring_repeats: int = 5
    instances: int = 0
    loads: tuple[float, ...] = (0.4, 0.7)
    short_tokens: int = 96
    long_tokens: int = 2048
    requests: int = 48
    seed: int = 0
    operators_s: float = 6.0
    profile_s: float = 20.0

    def quick(self) -> Settings:
        """Returns settings for a short run: its figures are not to be quoted."""
        return replace(
            self,
            lengths=self.lengths[:3],
            rounds=1,
            shares=self.shares[1:2],
            ring_repeats=2,
            loads=self.loads[-1:],
            requests=min(self.requests, 16),
            operators_s=min(self.operators_s, 2.0),
            profile_s=min(self.profile_s, 6.0),
        )

    @property
    def group_degrees(self) -> tuple[int, ...]:
        """Returns the degrees that the instances under load can form: powers of two, and all of
        them.
        """
        powers = {1 << bits for bits in range(1, self.instances.bit_length())}
        return tuple(sorted(powers | {self.instances}))

    @property
    def fleet(self) -> int:
        """Returns the number of prefill instances that the parts need together."""
        needed = [self.instances] if "load" in self.parts else []
        needed += self.degrees if "sp" in self.parts else ()
        needed += [new for _, new in self.growths] if "balancing" in self.parts else []
        return max(needed, default=0)


def resolved(settings: Settings) -> Settings:
    """Fills in the number of instances. Raises ConfigError for prompts that don't fit the KV."""
    token_bytes = _token_bytes(LLAMA_27M)
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
    cores = len(os.sched_getaffinity(0))
    instances = settings.instances or max(2, min(4, cores // settings.threads))
    return replace(settings, instances=instances)


async def run(settings: Settings, told: Told = lambda what: None) -> dict[str, Any]:
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
            document["ring"] = await asyncio.to_thread(_ring, settings, told)
        one = _one_instance(model, settings, told) if "load" in settings.parts else None
        if settings.fleet:
            groups, profile = await _groups(model, settings, one, told)
            document |= groups
            if profile is not None:
                path = Path(folder) / "profile.json"
                path.write_text(json.dumps(profile.to_json()))
                document["profile"] = profile.to_json()
                document["load"] = await _load(model, path, profile, settings, told)
    document["took_s"] = time.perf_counter() - begun_s
    return document


def _token_bytes(config: Mapping[str, Any]) -> int:
    """Returns the bytes of K/V of a token in float32, all layers."""
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    return int(8 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim)


def _engine_settings(settings: Settings) -> list[str]:
    return [
        "engine.device=cpu",
        "engine.dtype=float32",
        f"engine.threads={settings.threads}",
        f"engine.kv_bytes={settings.kv_bytes}",
        "engine.prefix_cache=off",  # every rate sends the same prompts
    ]


def _ring(settings: Settings, told: Told) -> list[dict[str, Any]]:
    rates = ring.measure(
        members=settings.ring_members,
        block_mib=settings.ring_mib,
        repeats=settings.ring_repeats,
        on_progress=lambda what: told(f"ring: {what}"),
    )
    return [asdict(rate) for rate in rates]


def _one_instance(model: Path, settings: Settings, told: Told) -> tuple[Subject, Measured]:
    """Measures one instance alone, as `millrace profile` does."""
    told("measuring a profile: operators")
    config = EngineConfig(
        device="cpu", dtype="float32", threads=settings.threads, kv_bytes=settings.kv_bytes
    )
    engine = open_engine(model, config)
    workload = Workload(engine, max_chunk_tokens=config.max_chunk_tokens, max_batch=1)
    try:
        measured = measure(workload, settings.operators_s)
    finally:
        workload.close()
        engine.close()
    subject = Subject(
        model=model.name,
        device=engine.device.type,
        dtype=engine.layout.dtype,
        threads=settings.threads,
        layers=engine.layout.num_layers,
        kv_bytes_per_token=engine.layout.bytes_per_token,
        max_chunk_tokens=config.max_chunk_tokens,
    )
    return subject, measured


async def _groups(
    model: Path, settings: Settings, one: tuple[Subject, Measured] | None, told: Told
) -> tuple[dict[str, Any], Profile | None]:
    """Runs the conductor's measurements; also returns the profile if the load needs one."""
    found: dict[str, Any] = {}
    profile = None
    fleet = FleetOptions(
        model=str(model),
        prefill=settings.fleet,
        settings=[*_engine_settings(settings), "engine.profile=none"],
    )
    async with Conductor(fleet, told) as conductor:
        if one is not None:
            told("measuring a profile: one instance and groups")
            subject, measured = one
            groups = await measure_groups(
                conductor.run,
                (1, *settings.group_degrees),
                longest=settings.long_tokens,
                budget_s=settings.profile_s,
                cores=len(os.sched_getaffinity(0)),
            )
            profile = build_profile(subject, measured, groups)
        if "sp" in settings.parts:
            found["sp"] = await cdsp_groups.scaling(
                conductor, settings.lengths, settings.degrees, settings.rounds, told
            )
            found["handshake"] = cdsp_groups.handshakes(found["sp"])
        if "balancing" in settings.parts:
            found["balancing"] = await cdsp_groups.balancing(
                conductor,
                settings.chunk_tokens,
                settings.shares,
                settings.growths,
                settings.rounds,
                told,
            )
    return found, profile


async def _load(
    model: Path, profile_path: Path, profile: Profile, settings: Settings, told: Told
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
        planner: await cdsp_live.live(planner, served, mix, rates_rps, told) for planner in PLANNERS
    }
    beyond_s = max(live[CDSP]["alone_s"] - profile.prefill.isolated_s(mix.short_tokens), 0.0)
    runs = []
    for number, (load, rate_rps) in enumerate(zip(settings.loads, rates_rps, strict=True)):
        requests = list(plan(mix.at(rate_rps)))
        told(f"simulating {rate_rps:.2g} requests/s")
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
