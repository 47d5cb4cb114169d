"""Runs all checks of `millrace doctor`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import typer

from millrace.cli.doctor.findings import FAILURE, Finding, show
from millrace.cli.doctor.fleet import fleet
from millrace.cli.doctor.machine import machine
from millrace.cli.doctor.store import store
from millrace.cli.process import write_json
from millrace.core.config import Config
from millrace.tables import Output


async def examined(config: Config, scheduler: str) -> list[Finding]:
    """Returns the findings of all checks."""
    found = list(machine())
    found += [one async for one in store(config.store)]
    found += [one async for one in fleet(scheduler)]
    return found


async def run(config: Config, scheduler: str, json_path: Path | None) -> None:
    """Prints all findings. Raises typer.Exit with status 1 if a check has failed."""
    found = await examined(config, scheduler)
    show(found, Output())
    if json_path is not None:
        write_json(json_path, {"findings": [asdict(one) for one in found]})
    if any(one.level == FAILURE for one in found):
        raise typer.Exit(1)
