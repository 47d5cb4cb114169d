"""Reads the options of `millrace sim`: clusters, traffic, failures, lists of values."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from millrace.core.autoscale.rules import AutoscaleConfig, DecodeTargets, PrefillTargets, Targets
from millrace.core.config import SchedulerConfig, load_config
from millrace.core.errors import ConfigError
from millrace.core.instance.packing import PackingConfig
from millrace.profiles import load_profile
from millrace.sim.cluster.spec import AutoscalePlan, Errors, Failure, SimSpec, Slowness
from millrace.sim.scenario import Scenario, Traffic
from millrace.sim.workload.workload import SloClass

F = TypeVar("F", Failure, Errors, Slowness)

_TABLES = ("scheduler", "sim", "packing", "autoscale")
_DEFAULT_T_TARGET_S = 0.05  # Medha's released default


#: The scheduler's choices; every combination of their values is a system.
AXES = ("policy", "planner", "preemption", "batch_tokens")


def build_systems(
    given: Mapping[str, Any], axes: Mapping[str, Sequence[object]]
) -> dict[str, Scenario]:
    """Returns a scenario per combination of the values of `axes`, named by its values.

    given: the options of clusters and traffic; `SimSpec` and `Traffic` explain their meaning.
    Raises ConfigError for bad input.
    """
    sent = _traffic(given)
    found: dict[str, Scenario] = {}
    for values in itertools.product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        parts = [str(value) for name, value in chosen.items() if len(axes[name]) > 1]
        spec = _spec(given, [f"scheduler.{name}={value}" for name, value in chosen.items()])
        scenario = Scenario(spec=spec, traffic=sent)
        scenario.traffic.options(spec.profile.model)  # raises ConfigError before any run
        found[" ".join(parts) or str(values[0])] = scenario
    return found


def _traffic(given: Mapping[str, Any]) -> Traffic:
    names = ("trace", "mix", "rate_scale", "slo_scale", "long_fraction", "requests", "seed")
    return Traffic(
        window_s=parse_range(given["window"], "--window") if given["window"] else None,
        rate_rps=given["rate"],
        slo_classes=tuple(SloClass.parse(text) for text in given["slo_class"]),
        **{name: given[name] for name in names},
    )


def _spec(given: Mapping[str, Any], chosen: Sequence[str]) -> SimSpec:
    tables: dict[str, list[str]] = {name: [] for name in _TABLES}
    for setting in given["settings"]:
        table, dot, rest = setting.partition(".")
        if not dot or table not in tables:
            raise ConfigError(
                f"--set {setting!r}: write TABLE.FIELD=VALUE, TABLE one of {', '.join(_TABLES)}"
            )
        tables[table].append(rest)
    scheduler = load_config(None, [*chosen, *(f"scheduler.{text}" for text in tables["scheduler"])])
    _require_use(tables["packing"], "packing", "--mixed", bool(given["mixed"]))
    _require_use(tables["autoscale"], "autoscale", "--autoscale", bool(given["autoscale"]))
    packing = _fields(PackingConfig, "packing", tables["packing"])
    if given["mixed"]:
        packing = {"t_target_s": _DEFAULT_T_TARGET_S} | packing
    decode = given["decode_profile"]
    return SimSpec(
        profile=load_profile(given["profile"]),
        decode_profile=load_profile(decode) if decode else None,
        packing=PackingConfig(**packing) if given["mixed"] else None,
        failures=tuple(_fault(Failure, "--failure", text) for text in given["failure"]),
        errors=tuple(_fault(Errors, "--errors", text) for text in given["errors"]),
        slowness=tuple(_fault(Slowness, "--slow", text) for text in given["slow"]),
        autoscale=_autoscale(given["autoscale"], tables["autoscale"]),
        scheduler=scheduler.scheduler,
        **{name: given[name] for name in ("prefill", "decode", "mixed", "kvp", "spp", "seed")},
        **_fields(SimSpec, "sim", tables["sim"]),
    )


def _require_use(texts: Sequence[str], table: str, option: str, is_used: bool) -> None:
    """Raises ConfigError for settings that would change nothing."""
    if texts and not is_used:
        raise ConfigError(f"--set {table}.{texts[0]}: it changes nothing without {option}")


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


def _fault(cls: type[F], option: str, text: str) -> F:
    """Parses AT_S:INSTANCE, and after them the dataclass's further fields, all numbers."""
    names = [f.name for f in dataclasses.fields(cls)]
    parts = text.split(":")
    try:
        if not 2 <= len(parts) <= len(names):
            raise ValueError
        given: dict[str, Any] = dict(zip(names, parts, strict=False))
        numbers = {name: float(text) for name, text in given.items() if name != "instance_id"}
        return cls(**given | numbers)
    except ValueError:
        rest = "".join(f"[:{name.upper()}" for name in names[2:]) + "]" * (len(names) - 2)
        raise ConfigError(f"{option} {text!r}: write it as AT_S:INSTANCE{rest}") from None


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
