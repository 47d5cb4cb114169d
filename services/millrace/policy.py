"""`millrace policy`: shows and changes how a running scheduler ranks requests."""

from __future__ import annotations

from pathlib import Path

from millrace.json_file import write_json
from millrace.wire.scheduler_client import get_settings, set_policy


async def show_or_change(address: str, policy: str, json_path: Path | None) -> None:
    """Changes to `policy`, unless it is empty, and prints what is in force.

    Raises MillraceError without a scheduler, for an unknown policy and for a bad path.
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
