"""`millrace improvement-rate`: shows and changes what a larger group must bring."""

from __future__ import annotations

from millrace.wire.scheduler_client import get_settings, set_improvement_rate


async def show_or_change(address: str, wanted: str) -> None:
    """Changes to `wanted`, a rate or a table, unless it is empty; prints what is in force.

    Raises MillraceError without a scheduler and for a rate or a table that makes no sense.
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
