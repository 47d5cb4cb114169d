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
from pathlib import Path

from millrace.bench.chaos.command import INSTANCES, Settings
from millrace.local.stack import Stack

KILL, STOP = "kill", "stop"
SESSION, THREADS = 3, 17  # fields of /proc/PID/stat after the command's name


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


def members(instance: int) -> list[int]:
    """Returns the processes of an instance's ranks and later stages, by its own process's id.

    They compute on several threads; the servers that fork them have one.
    """
    return [pid for pid, threads in followers(instance).items() if threads > 1]


def followers(service: int) -> dict[int, int]:
    """Returns the other processes of a service's session, by its own process's id, each with its
    number of threads; also after the service's end.
    """
    found = {}
    for pid in sorted(
        int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()
    ):
        with suppress(OSError):  # it has ended
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
            if int(fields[SESSION]) == service != pid:
                found[pid] = int(fields[THREADS])
    return found


async def strike(stack: Stack, fault: Fault) -> str:
    """Does the fault to one process; returns its name, or "" when none of the target is there, or
    that one has just ended by itself.

    Returns after the end of a stop.
    """
    living = {name: pid for name, pid in _processes(stack, fault.target) if pid is not None}
    if not living:
        return ""
    name = sorted(living)[int(fault.draw * len(living))]
    kills = fault.kind == KILL
    if kills and fault.target == "store-data" and stack.redis_data is not None:
        await asyncio.to_thread(shutil.rmtree, stack.redis_data)
    try:
        os.kill(living[name], signal.SIGKILL if kills else signal.SIGSTOP)
    except ProcessLookupError:
        return ""
    if kills:
        return name
    try:
        await asyncio.sleep(fault.stop_s)
    finally:
        with suppress(ProcessLookupError):
            os.kill(living[name], signal.SIGCONT)
    return name


def _processes(stack: Stack, target: str) -> list[tuple[str, int | None]]:
    if target in ("store", "store-data"):
        return [("store", stack.redis_pid)]
    if target == "member":
        names = [name for role in INSTANCES for name in stack.instances(role)]
        pids = [(name, pid) for name in names if (pid := stack.services[name].serving_pid)]
        found = [(name, enumerate(members(pid), start=1)) for name, pid in pids]
        return [(f"{name} member {number}", pid) for name, ones in found for number, pid in ones]
    names = stack.instances(target) or [target]
    hit = [stack.services[name] for name in names if name in stack.services]
    return [(service.name, service.serving_pid) for service in hit]
