"""Runs `millrace profile`: measures, fits, caches the profile and shows its errors."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from millrace.container_limits import usable_cores
from millrace.core.config import EngineConfig
from millrace.core.cost.profile import Profile
from millrace.core.errors import ConfigError
from millrace.engine.assembly import open_engine, profile_key
from millrace.profiler.accuracy import Compared, compare
from millrace.profiler.fitting import Subject, build_profile
from millrace.profiler.groups.conductor import Conductor, FleetOptions
from millrace.profiler.groups.measure import MeasuredGroups, devices_of, measure_groups
from millrace.profiler.measure import Measured, measure
from millrace.profiler.workload import Workload
from millrace.profiles.cache import ProfileCache, keyed, require_writable, write_whole
from millrace.tables import Output

#: KV memory of a group's instances, in longest prompts, unless configured: room for the prompt, for
#: a ring's buffers and for decode's tokens.
KV_PROMPTS = 4
KV_LEAST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """The options of `millrace profile`.

    max_tokens: of the longest prompt, 0 for the model's maximum; the budget may allow fewer.
    out, report: files to write in addition to the cache. if_missing: do nothing if the cache has
    the profile. sp: SP degrees of groups to measure, with half of the budget; the instances are
    configured by `settings` (`section.field=value`) and the file `config`.
    """

    model: str
    budget_s: float
    max_tokens: int = 0
    out: Path | None = None
    report: Path | None = None
    if_missing: bool = False
    sp: tuple[int, ...] = ()
    settings: Sequence[str] = ()
    config: Path | None = None

    def __post_init__(self) -> None:
        if not 0.0 < self.budget_s < math.inf:
            raise ConfigError(f"budget_s is {self.budget_s:g}; it must be more than 0 and finite")
        if self.max_tokens < 0:
            raise ConfigError(f"max_tokens is {self.max_tokens}; it must be 1 or more, 0: all")
        if self.sp and min(self.sp) < 2:
            raise ConfigError(f"sp has {min(self.sp)}; a group has 2 instances or more")


def run(options: ProfileOptions, config: EngineConfig) -> None:
    """Runs the command. Raises MillraceError for an unusable model, setting or file."""
    if config.stages > 1:
        raise ConfigError(
            f"engine.stages is {config.stages}; profiles are of whole instances, and those in "
            "stages measure themselves at their start"
        )
    cache, key = ProfileCache(config.profile_cache), profile_key(options.model, config)
    path = cache.path(key)
    kept = cache.load(key) if options.if_missing else None
    if kept is not None and set(options.sp) <= set(kept.measured_sp):
        print(path)
        return
    for asked in (options.out, options.report, path):
        if asked is not None:
            require_writable(asked)
    measured, subject = _measure(options, config)
    groups = None
    if options.sp:
        groups = asyncio.run(_measure_groups(options, config, subject, measured.longest))
    profile = build_profile(subject, measured, groups)
    compared = compare(profile, measured, config.max_chunk_tokens, groups)
    cache.store(key, profile)
    if options.out is not None:
        write_whole(options.out, keyed(key, profile))
    if options.report is not None:
        write_whole(options.report, json.dumps(_report(profile, measured, compared), indent=1))
    console = Output()
    console.print(_table(profile, compared))
    console.print(
        f"{profile.name}: prompts up to {measured.longest} tokens, {measured.spent_s:.1f} s "
        f"on {subject.device}",
        highlight=False,
    )
    print(path)


def _measure(options: ProfileOptions, config: EngineConfig) -> tuple[Measured, Subject]:
    with _progress(f"measuring {Path(options.model).name}") as bar:
        engine = open_engine(options.model, config)
        key = profile_key(engine.folder, config)
        subject = Subject(
            model=engine.folder.name,
            device=key.device,
            dtype=key.dtype,
            threads=key.threads,
            layers=engine.layout.num_layers,
            kv_bytes_per_token=engine.layout.bytes_per_token,
            max_chunk_tokens=config.max_chunk_tokens,
            tp=config.tensor_parallel,
            is_accelerated=engine.device.type != "cpu",
        )
        workload = Workload(
            engine,
            max_chunk_tokens=config.max_chunk_tokens,
            max_batch=config.max_batch,
            max_tokens=options.max_tokens,
        )
        task = bar.tasks[0].id
        with closing(engine), closing(workload):
            measured = measure(
                workload,
                options.budget_s / 2 if options.sp else options.budget_s,
                lambda share: bar.update(task, completed=share),
            )
    return measured, subject


async def _measure_groups(
    options: ProfileOptions, config: EngineConfig, subject: Subject, longest: int
) -> MeasuredGroups:
    """Measures groups of live instances with the settings of the profile's later readers."""
    most = max(options.sp)
    kv_bytes = config.kv_bytes or KV_PROMPTS * longest * subject.kv_bytes_per_token + KV_LEAST_BYTES
    fleet = FleetOptions(
        model=options.model,
        prefill=most,
        settings=[*options.settings, "engine.profile=none", f"engine.kv_bytes={kv_bytes}"],
        config=options.config,
        visible=_devices(most, config.tensor_parallel) if subject.is_accelerated else (),
    )
    degrees = ", ".join(map(str, options.sp))
    with _progress(f"measuring groups of {degrees}") as bar:
        task = bar.tasks[0].id
        async with Conductor(fleet) as conductor:
            return await measure_groups(
                conductor.run,
                options.sp,
                longest=longest,
                budget_s=options.budget_s / 2,
                cores=usable_cores(),
                progress=lambda share: bar.update(task, completed=share),
            )


def _devices(instances: int, ranks: int) -> list[str]:
    """Returns each instance's devices, which this process frees. Raises ConfigError for too few."""
    torch.cuda.empty_cache()
    count = torch.cuda.device_count()
    names = [f"GPU-{torch.cuda.get_device_properties(i).uuid}" for i in range(count)]
    try:
        return devices_of(names, instances, ranks)
    except ValueError as error:
        raise ConfigError(f"sp has {instances}: {error}") from None


@contextmanager
def _progress(title: str) -> Iterator[Progress]:
    """Shows a progress bar on a terminal, else one line."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        bar.add_task(title, total=1.0)
        if not console.is_terminal:
            console.print(title, highlight=False)
        yield bar


def _table(profile: Profile, compared: list[Compared]) -> Table:
    table = Table(title="error on held-out points")
    for heading in ("model", "points", "median", "worst"):
        table.add_column(heading, justify="left" if heading == "model" else "right")
    for model in (name for name in profile.errors if not name.endswith("_worst")):
        points = sum(one.model == model and one.is_held_out for one in compared)
        found = (profile.errors[model], profile.errors[f"{model}_worst"])
        table.add_row(model, str(points), *(f"{100 * error:.1f} %" for error in found))
    return table


def _report(profile: Profile, measured: Measured, compared: list[Compared]) -> dict[str, object]:
    return {
        "profile": profile.name,
        "device": profile.device,
        "longest_tokens": measured.longest,
        "rounds": measured.rounds,
        "spent_s": measured.spent_s,
        "errors": dict(profile.errors),
        "points": [
            {
                "model": one.model,
                **asdict(one.case),
                "held_out": one.is_held_out,
                "measured_s": one.measured_s,
                "predicted_s": one.predicted_s,
                "error": one.error,
            }
            for one in compared
        ],
    }
