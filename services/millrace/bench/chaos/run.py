"""Runs a stack under load and faults for `millrace bench chaos`, and makes the document."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

import millrace.profiles
from millrace.bench.chaos.answers import ENDS, RIGHT, Answer, Ask, asks, is_answered, stream
from millrace.bench.chaos.command import Settings
from millrace.bench.chaos.faults import STOP, Fault, drawn, followers, strike
from millrace.bench.chaos.other_answers import OtherAnswer
from millrace.bench.common.lasting_answer import LastingAnswer
from millrace.bench.common.machine_limits import describe_machine
from millrace.bench.common.options import Announce
from millrace.core.errors import MillraceError
from millrace.local.options import StackOptions
from millrace.local.stack import Stack, UncleanStopError
from millrace.proxy.model_card import read_model_card

#: A stack that answers no request for so long after a fault has not recovered.
RECOVERY_TIMEOUT_S = 180.0
PROBE_PAUSE_S = 0.1
#: A prompt is not held to be the cause of so many deaths of instances: faults are.
MOST_DEATHS = 16
GPU_PROFILE = Path(millrace.profiles.__file__).parent / "llama3-8b-a100-tp1.json"
SETTLE_S = 1.0  # from the end of the load until the services are looked at
FAREWELL_S = 10.0  # from the end of the stack until no process of it is left
#: The longest answers' examples that a report quotes of each end.
EXAMPLES = 5


class DisturbedError(MillraceError):
    """A prompt could not be answered before any fault."""


@dataclass(slots=True)
class Struck:
    """A fault that happened: seconds since the begin, and until a request was answered again."""

    at_s: float
    name: str
    process: str
    stop_s: float
    recovery_s: float | None = None


async def run(settings: Settings, announce: Announce = lambda what: None) -> dict[str, Any]:
    """Returns the document. Raises MillraceError when the stack can't start or answer at all."""
    card = read_model_card(settings.folder)
    announce("starting the stack")
    soak = Soak(settings, asks(settings, card.vocab_size), announce)
    leaks: list[str] = []
    try:
        async with Stack(_stack_options(settings)) as stack:
            await soak.run(stack)
            announce("stopping the stack")
    except UncleanStopError as error:
        leaks = str(error).split("; ")
    leaks += await soak.left()
    return soak.document() | {"leaks": leaks}


class Soak:
    """Streams answers and strikes, each in a task of its own, until the time is over."""

    def __init__(self, settings: Settings, made: Sequence[Ask], announce: Announce) -> None:
        self._settings = settings
        self._asks = made
        self._announce = announce
        self._expected: list[LastingAnswer | OtherAnswer] = []
        self._answers: list[Answer] = []
        self._struck: list[Struck] = []
        self._begun_s = self._until_s = 0.0
        self._next = 0
        self._pids: dict[int, str] = {}  # every process of a service, ever, with its name

    async def run(self, stack: Stack) -> None:
        limits = httpx.Limits(max_connections=2 * self._settings.streams + 8)
        async with httpx.AsyncClient(base_url=stack.url, timeout=None, limits=limits) as client:
            for ask in self._asks:
                self._announce(f"undisturbed answers ({ask.number + 1} of {len(self._asks)})")
                alone = await stream(client, ask)
                if alone.end != RIGHT:
                    raise DisturbedError(f"before any fault: {alone.end}: {alone.detail}")
                self._expected.append(alone.read)
            self._begun_s = time.monotonic()
            self._until_s = self._begun_s + 60 * self._settings.minutes
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._strike(stack, client))
                for _ in range(self._settings.streams):
                    tasks.create_task(self._load(client))
            await self._whole(stack)

    async def _whole(self, stack: Stack) -> None:
        """Waits until every service runs again. A scheduler whose lease the store has lost ends
        with its next renewal, and is started again.
        """
        until_s = time.monotonic() + RECOVERY_TIMEOUT_S
        await asyncio.sleep(SETTLE_S)
        while time.monotonic() < until_s:
            if all(service.serving_pid for service in stack.services.values()):
                return
            await asyncio.sleep(PROBE_PAUSE_S)

    async def left(self) -> list[str]:
        """Returns the processes that are left of services a while after their end."""
        until_s = time.monotonic() + FAREWELL_S
        while True:
            left = {name: found for pid, name in self._pids.items() if (found := followers(pid))}
            if not left or time.monotonic() >= until_s:
                return [f"{name} left the processes {list(pids)}" for name, pids in left.items()]
            await asyncio.sleep(PROBE_PAUSE_S)

    async def _load(self, client: httpx.AsyncClient) -> None:
        """Streams one answer after the other; the last one to its end."""
        while time.monotonic() < self._until_s:
            ask = self._asks[self._next % len(self._asks)]
            self._next += 1
            answer = await stream(client, ask, self._expected[ask.number])
            self._answers.append(answer)
            if answer.end != RIGHT:
                self._announce(f"{answer.end}: {answer.detail}")

    async def _strike(self, stack: Stack, client: httpx.AsyncClient) -> None:
        for fault in drawn(self._settings):
            await asyncio.sleep(fault.pause_s)
            if time.monotonic() >= self._until_s:
                return
            self._tell(fault)
            at_s = time.monotonic()
            self._pids |= {
                service.serving_pid: service.name
                for service in stack.services.values()
                if service.serving_pid
            }
            process = await strike(stack, fault)
            if not process:
                continue
            stop_s = fault.stop_s if fault.kind == STOP else 0.0
            struck = Struck(round(at_s - self._begun_s, 3), fault.name, process, round(stop_s, 3))
            self._struck.append(struck)
            struck.recovery_s = await self._recovery_s(client, at_s + stop_s)

    async def _recovery_s(self, client: httpx.AsyncClient, since_s: float) -> float | None:
        """Returns the seconds until a short request is answered, sent again and again."""
        shortest = min(self._asks, key=lambda ask: len(ask.prompt) + ask.max_tokens)
        while time.monotonic() - since_s < RECOVERY_TIMEOUT_S:
            if await is_answered(client, shortest):
                return round(time.monotonic() - since_s, 3)
            await asyncio.sleep(PROBE_PAUSE_S)
        return None

    def _tell(self, fault: Fault) -> None:
        ends = Counter(answer.end for answer in self._answers)
        left_s = self._until_s - time.monotonic()
        counts = ", ".join(f"{ends[end]} {end}" for end in ENDS if ends[end]) or "none yet"
        self._announce(
            f"fault {len(self._struck) + 1}: {fault.name}; answers: {counts} ({left_s:.0f} s left)"
        )

    def document(self) -> dict[str, Any]:
        ends = Counter(answer.end for answer in self._answers)
        recoveries: dict[str, list[float | None]] = {}
        for one in self._struck:
            recoveries.setdefault(one.name, []).append(one.recovery_s)
        return {
            "benchmark": "chaos",
            "settings": asdict(self._settings),
            "machine": describe_machine(),
            "requests": len(self._answers),
            "tokens": sum(len(answer.read.token_ids) for answer in self._answers),
            "ends": {end: ends[end] for end in ENDS},
            "refusals": sum(answer.read.refusals for answer in self._answers),
            "forgotten": sum(answer.read.forgotten for answer in self._answers),
            "breaks": sum(answer.read.breaks for answer in self._answers),
            "interruptions": Counter(
                message for answer in self._answers for message in answer.read.interruptions
            ),
            "examples": {
                end: [a.detail[:300] for a in self._answers if a.end == end][:EXAMPLES]
                for end in ENDS
                if end != RIGHT and ends[end]
            },
            "faults": len(self._struck),
            "recoveries_s": recoveries,
            "struck": [asdict(one) for one in self._struck],
            "answers": {  # columns: an hour has thousands
                "end": [one.end for one in self._answers],
                "ended_s": [round(one.ended_s - self._begun_s, 3) for one in self._answers],
                "longest_pause_s": [round(one.read.longest_pause_s, 3) for one in self._answers],
            },
        }


def _stack_options(settings: Settings) -> StackOptions:
    planned = ["engine.profile=none"]
    if settings.sp > 1:  # groups are planned by their times; these are of GPUs
        planned = [f"engine.profile={GPU_PROFILE}", "scheduler.planner=fixed_sp"]
        planned.append(f"scheduler.fixed_sp={settings.sp}")
    of_roles = settings.role_settings()
    return StackOptions(
        model=settings.folder,
        model_name="chaos",
        prefill=settings.prefill,
        decode=settings.decode,
        colocated=settings.colocated,
        colocation=settings.role,
        kvp=settings.kvp,
        schedulers=settings.schedulers,
        port=0,
        tls=settings.tls,
        logs=Path(settings.logs) if settings.logs else None,
        threads=1,
        role_settings=of_roles,
        settings=[
            "engine.device=cpu",
            "engine.dtype=float32",
            *planned,
            f"engine.kv_bytes={64 << 20}",
            f"scheduler.heartbeat_s={settings.lease_s / 10}",
            f"scheduler.lease_s={settings.lease_s}",
            f"scheduler.max_kv_tokens_per_worker={settings.spread_tokens if settings.kvp else 0}",
            f"scheduler.max_deaths={MOST_DEATHS}",
            *(["proxy.tool_parser=hermes"] if "tool" in settings.answers else []),
            *of_roles.pop(""),
        ],
    )
