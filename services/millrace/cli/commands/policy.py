"""`millrace policy` and `improvement-rate`: show and change a running scheduler's settings."""

from __future__ import annotations

import math
from collections.abc import Iterable
from pathlib import Path

from millrace.cli.process import write_json
from millrace.core.errors import ConfigError
from millrace.core.weights import Weights, is_weight, weight_range
from millrace.wire.clients.scheduler_client import get_settings, set_improvement_rate, set_policy


async def show_or_change_policy(
    address: str, policy: str, weights: Weights, json_path: Path | None
) -> None:
    """Changes to `policy`, unless it is empty, and to `weights`; prints the settings in force.

    Raises MillraceError if no scheduler answers, for an unknown policy, class or tenant, for a bad
    weight and for a bad path.
    """
    if policy or weights != Weights():
        found = await set_policy(address, policy, weights if weights != Weights() else None)
        if policy:
            print(f"{found['before']} -> {found['policy']}")
        if "weights" in found:
            _print_weights(found["weights"])
    else:
        found = await get_settings(address)
        for name in ("policy", "preemption", "planner"):
            print(f"{name:<12}{found[name]}")
        print(f"{'to choose':<12}{', '.join(found['policies'])}")
        _print_weights(found["weights"])
    if json_path is not None:
        write_json(json_path, found)


def _print_weights(weights: dict[str, dict[str, float]]) -> None:
    for kind, by_name in weights.items():
        if by_name:
            print(f"{kind:<12}{', '.join(f'{name} {by_name[name]:g}' for name in by_name)}")


def parse_weights(classes: Iterable[str], tenants: Iterable[str]) -> Weights:
    """Reads NAME=WEIGHT texts of the options --weight and --tenant-weight.

    Raises ConfigError naming the option.
    """
    return Weights(
        classes=dict(_weight("--weight", text) for text in classes),
        tenants=dict(_weight("--tenant-weight", text) for text in tenants),
    )


def _weight(option: str, text: str) -> tuple[str, float]:
    name, _, number = text.rpartition("=")
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not name or not is_weight(value):
        raise ConfigError(f"{option} {text!r}: write it as NAME=WEIGHT, a number {weight_range()}")
    return name, value


async def show_or_change_improvement_rate(address: str, wanted: str) -> None:
    """Changes to `wanted`, a rate or a table, unless it is empty; prints the rate in force.

    Raises MillraceError if no scheduler answers, and for an invalid rate or table.
    """
    if not wanted:
        print(f"{(await get_settings(address))['improvement_rate']:g}")
        return
    try:
        rate: float | str = float(wanted)
    except ValueError:
        rate = wanted
    found = await set_improvement_rate(address, rate)
    print(f"{found['before']:g} -> {found['improvement_rate']:g}")
