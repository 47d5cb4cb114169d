"""`millrace policy` and `improvement-rate`: show and change a running scheduler's settings."""

from __future__ import annotations

from pathlib import Path

from millrace.cli.process import write_json
from millrace.wire.clients.scheduler_client import get_settings, set_improvement_rate, set_policy


async def show_or_change_policy(address: str, policy: str, json_path: Path | None) -> None:
    """Changes to `policy`, unless it is empty, and prints the settings in force.

    Raises MillraceError if no scheduler answers, for an unknown policy and for a bad path.
    """
    if policy:
        found = await set_policy(address, policy)
        print(f"{found['before']} -> {found['policy']}")
    else:
        found = await get_settings(address)
        for name in ("policy", "preemption", "planner"):
            print(f"{name:<12}{found[name]}")
        print(f"{'to choose':<12}{', '.join(found['policies'])}")
    if json_path is not None:
        write_json(json_path, found)


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
