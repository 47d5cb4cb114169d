"""The faults of `millrace bench chaos`: which, when, and what they do to a process."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from millrace.bench.chaos.command import Settings
from millrace.local.stack import Stack

KILL, STOP = "kill", "stop"


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault to come. `draw` in [0, 1) chooses among the target's processes."""

    kind: str
    target: str
    pause_s: float
    stop_s: float
    draw: float

    @property
    def name(self) -> str:
        return f"{self.kind} {self.target}"


def drawn(settings: Settings) -> Iterator[Fault]:
    """Yields faults without end; the seed alone decides them."""
    rng = random.Random(f"faults {settings.seed}")
    while True:
        yield Fault(
            kind=rng.choice((KILL, STOP)),
            target=rng.choice(settings.targets),
            pause_s=rng.expovariate(1 / settings.pause_s) if settings.pause_s else 0.0,
            stop_s=rng.uniform(0.1, 3.0) * settings.lease_s,
            draw=rng.random(),
        )


async def strike(stack: Stack, fault: Fault) -> str:
    """Does the fault to one process; returns its name, or "" when none of the target is there.

    Returns after the end of a stop.
    """
    living = {name: pid for name, pid in _processes(stack, fault.target) if pid is not None}
    if not living:
        return ""
    name = sorted(living)[int(fault.draw * len(living))]
    if fault.kind == KILL:
        if fault.target == "store-data" and stack.redis_data is not None:
            await asyncio.to_thread(shutil.rmtree, stack.redis_data)
        os.kill(living[name], signal.SIGKILL)
        return name
    os.kill(living[name], signal.SIGSTOP)
    try:
        await asyncio.sleep(fault.stop_s)
    finally:
        with suppress(ProcessLookupError):
            os.kill(living[name], signal.SIGCONT)
    return name


def _processes(stack: Stack, target: str) -> list[tuple[str, int | None]]:
    if target in ("store", "store-data"):
        return [("store", stack.redis_pid)]
    names = stack.instances(target) or [target]
    hit = [stack.services[name] for name in names if name in stack.services]
    return [(service.name, service.serving_pid) for service in hit]
