"""`millrace fleet`: a running scheduler's instances, and the signals that scale its pools."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from rich.table import Table

from millrace.cli.process import write_json
from millrace.core.autoscale.load import FleetLoad
from millrace.tables import Output, table
from millrace.wire.clients.scheduler_client import (
    InstanceView,
    get_instances,
    get_load,
    get_mechanisms,
)

#: Column and field of `PoolLoad`; docs/guides/autoscaling.md explains the signals.
SIGNALS = (
    ("backlog s", "backlog_s"),
    ("arriving", "arriving"),
    ("TTFT/SLO", "ttft_slo_ratio"),
    ("KV in use", "kv_utilisation"),
    ("TBT/SLO", "tbt_slo_ratio"),
)


async def show(address: str, json_path: Path | None) -> None:
    """Prints both tables. Raises MillraceError if no scheduler answers, and for a bad path."""
    instances, load = await get_instances(address), await get_load(address)
    in_force = await get_mechanisms(address)
    console = Output()
    console.print(_instances(instances))
    console.print(_pools(load))
    for one in in_force:
        console.print(str(one), markup=False, highlight=False, soft_wrap=True)
    console.print(f"{load.parked_requests} requests are parked at the proxies")
    if json_path is not None:
        found = {
            "instances": [asdict(one) for one in instances],
            "mechanisms": [asdict(one) for one in in_force],
            **asdict(load),
        }
        write_json(json_path, found)


def _instances(instances: Iterable[InstanceView]) -> Table:
    rows = (
        {**asdict(one), "takes_work": _takes_work(one), "used": one.total_pages - one.free_pages}
        for one in sorted(instances, key=lambda one: (one.role, one.id))
    )
    return table(
        "",
        "instance | role | takes work | running | waiting | held | pages used",
        "{id} | {role} | {takes_work} | {running} | {waiting} | {held_requests} | "
        "{used} of {total_pages}",
        rows,
        left=3,
    )


def _takes_work(one: InstanceView) -> str:
    if one.draining:
        return "no"
    if one.breaker == "open":
        return "no: errors"
    if one.slowness == "open":
        return "no: slow"
    return "one, as a probe" if "half_open" in (one.breaker, one.slowness) else "yes"


def _pools(load: FleetLoad) -> Table:
    names = " | ".join(name for name, _ in SIGNALS)
    signals = " | ".join(f"{{{field}}}" for _, field in SIGNALS)
    rows = (
        {**asdict(pool), **{field: _signal(getattr(pool, field)) for _, field in SIGNALS}}
        for pool in load.pools.values()
    )
    return table(
        "",
        f"pool | ready | draining | requests | {names}",
        f"{{role}} | {{ready}} | {{draining}} | {{active_requests}} | {signals}",
        rows,
        left=1,
    )


def _signal(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"
