"""Reads the options of `millrace sim`: clusters, traffic, failures, lists of values."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from millrace.core.autoscale.rules import AutoscaleConfig, DecodeTargets, PrefillTargets, Targets
from millrace.core.config import SchedulerConfig, load_config
from millrace.core.errors import ConfigError
from millrace.core.instance.packing import PackingConfig
from millrace.profiles import load_profile
from millrace.sim.cluster.spec import AutoscalePlan, Failure, SimSpec
from millrace.sim.scenario import Scenario, Traffic
from millrace.sim.workload.workload import SloClass

_TABLES = ("scheduler", "sim", "packing", "autoscale")
_DEFAULT_T_TARGET_S = 0.05  # Medha's released default


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterOptions:
    """The options of a cluster; `SimSpec` explains their meaning."""

    profile: str
    decode_profile: str
    prefill: int
    decode: int
    mixed: int
    kvp: int
    spp: int
    failures: Sequence[str]
    autoscale: Sequence[str]
    settings: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficOptions:
    """The options of traffic; `Traffic` explains their meaning."""

    trace: Path | None
    mix: str
    window: str
    rate: float | None
    rate_scale: float
    slo_scale: float
    slo_classes: Sequence[str]
    long_fraction: float
    requests: int | None
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemOptions:
    """Values of the scheduler's choices; every combination is a system."""

    policies: Sequence[str]
    planners: Sequence[str]
    preemptions: Sequence[str]
    batch_tokens: Sequence[int]


def build_systems(
    cluster: ClusterOptions, traffic: TrafficOptions, systems: SystemOptions
) -> dict[str, Scenario]:
    """Returns a scenario per combination, named by its values. Raises ConfigError for bad input."""
    sent = _traffic(traffic)
    axes: list[tuple[str, Sequence[object]]] = [
        ("policy", systems.policies),
        ("planner", systems.planners),
        ("preemption", systems.preemptions),
        ("batch_tokens", systems.batch_tokens),
    ]
    found: dict[str, Scenario] = {}
    for values in itertools.product(*(values for _, values in axes)):
        chosen = [f"scheduler.{name}={v}" for (name, _), v in zip(axes, values, strict=True)]
        parts = [str(v) for (_, of), v in zip(axes, values, strict=True) if len(of) > 1]
        spec = _spec(cluster, chosen, traffic.seed)
        scenario = Scenario(spec=spec, traffic=sent)
        scenario.traffic.options(spec.profile.model)  # raises ConfigError before any run
        found[" ".join(parts) or str(values[0])] = scenario
    return found


def _traffic(options: TrafficOptions) -> Traffic:
    return Traffic(
        trace=options.trace,
        mix=options.mix,
        window_s=parse_range(options.window, "--window") if options.window else None,
        rate_rps=options.rate,
        rate_scale=options.rate_scale,
        slo_scale=options.slo_scale,
        slo_classes=tuple(SloClass.parse(text) for text in options.slo_classes),
        long_fraction=options.long_fraction,
        requests=options.requests,
        seed=options.seed,
    )


def _spec(options: ClusterOptions, chosen: Sequence[str], seed: int) -> SimSpec:
    tables: dict[str, list[str]] = {name: [] for name in _TABLES}
    for setting in options.settings:
        table, dot, rest = setting.partition(".")
        if not dot or table not in tables:
            raise ConfigError(
                f"--set {setting!r}: write TABLE.FIELD=VALUE, TABLE one of {', '.join(_TABLES)}"
            )
        tables[table].append(rest)
    scheduler = load_config(None, [*chosen, *(f"scheduler.{text}" for text in tables["scheduler"])])
    packing = _fields(PackingConfig, "packing", tables["packing"])
    decode = options.decode_profile
    given = _fields(SimSpec, "sim", tables["sim"])
    return SimSpec(
        profile=load_profile(options.profile),
        decode_profile=load_profile(decode) if decode else None,
        prefill=options.prefill,
        decode=options.decode,
        mixed=options.mixed,
        kvp=options.kvp,
        spp=options.spp,
        packing=PackingConfig(**({"t_target_s": _DEFAULT_T_TARGET_S} | packing))
        if options.mixed
        else None,
        failures=tuple(map(_failure, options.failures)),
        autoscale=_autoscale(options.autoscale, tables["autoscale"]),
        scheduler=scheduler.scheduler,
        seed=seed,
        **given,
    )


#: Fields of SimSpec that have their own options, or are not numbers.
_OWN = {"profile", "decode_profile", "prefill", "decode", "mixed", "kvp", "spp", "seed"}


def _fields(cls: type[Any], table: str, texts: Sequence[str]) -> dict[str, Any]:
    """Parses FIELD=VALUE texts into values of a dataclass's numeric and text fields."""
    kinds: dict[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str, "bool": _flag}
    known = {
        f.name: kinds[str(f.type)]
        for f in dataclasses.fields(cls)
        if str(f.type) in kinds and not (cls is SimSpec and f.name in _OWN)
    }
    found: dict[str, Any] = {}
    for text in texts:
        name, _, value = text.partition("=")
        if name not in known:
            raise ConfigError(f"--set {table}.{text}: there are {', '.join(sorted(known))}")
        try:
            found[name] = known[name](value)
        except ValueError:
            wanted = str(next(f.type for f in dataclasses.fields(cls) if f.name == name))
            raise ConfigError(f"--set {table}.{text}: {name} must be {wanted}") from None
    return found


def _flag(text: str) -> bool:
    if text not in ("true", "false"):
        raise ValueError
    return text == "true"


def _failure(text: str) -> Failure:
    parts = text.split(":")
    try:
        if len(parts) not in (2, 3):
            raise ValueError
        down_s = {"down_s": float(parts[2])} if len(parts) == 3 else {}
        return Failure(at_s=float(parts[0]), instance_id=parts[1], **down_s)
    except ValueError:
        raise ConfigError(f"--failure {text!r}: write it as AT_S:INSTANCE[:DOWN_S]") from None


_TARGETS: dict[str, tuple[Targets, ...]] = {
    "prefill": (PrefillTargets(),),
    "decode": (DecodeTargets(),),
    "mixed": (PrefillTargets(), DecodeTargets()),
}


def _autoscale(texts: Sequence[str], settings: Sequence[str]) -> AutoscalePlan | None:
    """Parses POOL:LEAST:MOST texts into a plan with the default targets; None without texts."""
    pools: dict[str, AutoscaleConfig] = {}
    for text in texts:
        pool, *ends = text.split(":")
        if pool not in _TARGETS or len(ends) != 2 or not all(end.isdecimal() for end in ends):
            raise ConfigError(
                f"--autoscale {text!r}: write POOL:LEAST:MOST, POOL one of {', '.join(_TARGETS)}"
            )
        pools[pool] = AutoscaleConfig(
            targets=_TARGETS[pool], min_replicas=int(ends[0]), max_replicas=int(ends[1])
        )
    given = _fields(AutoscalePlan, "autoscale", settings)
    if not pools:
        return None
    prefill, decode, mixed = (pools.get(pool) for pool in _TARGETS)
    return AutoscalePlan(prefill=prefill, decode=decode, mixed=mixed, **given)


def parse_range(text: str, option: str) -> tuple[float, float]:
    """Parses two ascending numbers, START:END. Raises ConfigError naming `option`."""
    numbers = parse_numbers(text.replace(":", ","), option) if text.count(":") == 1 else ()
    if len(numbers) != 2 or not numbers[0] < numbers[1]:
        raise ConfigError(f"{option} {text!r}: write it as START_S:END_S, with START_S < END_S")
    return numbers[0], numbers[1]


def parse_numbers(text: str, option: str) -> tuple[float, ...]:
    """Parses numbers >= 0 with commas between. Raises ConfigError naming `option`."""
    try:
        numbers = tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        numbers = (math.nan,)
    if not all(0 <= number < math.inf for number in numbers):
        raise ConfigError(f"{option} {text!r}: write numbers >= 0 with commas between")
    return numbers


def scheduler_settings(config: SchedulerConfig) -> dict[str, object]:
    """Returns the scheduler's settings that affect decisions, for the JSON document."""
    names = ("policy", "planner", "preemption", "batch_tokens", "fixed_sp", "improvement_rate")
    return {name: getattr(config, name) for name in (*names, "tasks_ahead")}
