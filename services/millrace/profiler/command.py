"""`millrace profile`: measures, fits, keeps the profile in the cache and says how far it is off."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from millrace.core.config import EngineConfig
from millrace.core.errors import ConfigError
from millrace.core.profile import Profile
from millrace.engine.assembly import open_engine, profile_key
from millrace.profiler.accuracy import Compared, compare
from millrace.profiler.fitting import Subject, build_profile
from millrace.profiler.measure import Measured, measure
from millrace.profiler.workload import Workload
from millrace.profiles.cache import ProfileCache, keyed, require_writable, write_whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """max_tokens: of the longest prompt, 0 for the model's own most; the budget may stop earlier.
    out, report: files to write beside the cache's. if_missing: nothing is done when the cache has
    the profile.
    """

    model: str
    budget_s: float
    max_tokens: int = 0
    out: Path | None = None
    report: Path | None = None
    if_missing: bool = False

    def __post_init__(self) -> None:
        if not 0.0 < self.budget_s < math.inf:
            raise ConfigError(f"budget_s is {self.budget_s:g}; it must be more than 0 and finite")
        if self.max_tokens < 0:
            raise ConfigError(f"max_tokens is {self.max_tokens}; it must be 1 or more, 0: all")


def run(options: ProfileOptions, config: EngineConfig) -> None:
    """Does the command. Raises MillraceError for a model, setting or file that won't do."""
    cache, key = ProfileCache(config.profile_cache), profile_key(options.model, config)
    path = cache.path(key)
    if options.if_missing and cache.load(key) is not None:
        print(path)
        return
    for asked in (options.out, options.report, path):
        if asked is not None:
            require_writable(asked)
    measured, subject = _measure(options, config)
    profile = build_profile(subject, measured)
    compared = compare(profile, measured, config.max_chunk_tokens)
    cache.store(key, profile)
    if options.out is not None:
        write_whole(options.out, keyed(key, profile))
    if options.report is not None:
        write_whole(options.report, json.dumps(_report(profile, measured, compared), indent=1))
    console = Console()
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
        )
        workload = Workload(
            engine,
            max_chunk_tokens=config.max_chunk_tokens,
            max_batch=config.max_batch,
            max_tokens=options.max_tokens,
        )
        try:
            task = bar.tasks[0].id
            measured = measure(
                workload, options.budget_s, lambda share: bar.update(task, completed=share)
            )
        finally:
            workload.close()
    return measured, subject


@contextmanager
def _progress(title: str) -> Iterator[Progress]:
    """A bar on a terminal, one line elsewhere."""
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
