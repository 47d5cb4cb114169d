"""The scheduler's loop and real roles: an instance computes in the order of the policy."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from millrace.core.config import SchedulerConfig
from millrace.core.request import Slo
from millrace.core.scheduler.commands import Command, Order
from millrace.core.scheduler.events import Reported, Submitted
from millrace.core.scheduler.reports import Report
from millrace.decode.loop import DecodeRole
from millrace.prefill.loop import PrefillRole
from millrace.scheduler.loop import SchedulerLoop
from millrace.scheduler.peers import Worker
from millrace.scheduler.recorder import Recorder
from millrace.state.memory_store import MemoryStore
from millrace.telemetry.metrics import Registry
from millrace.wire.codec import scheduler as codec
from millrace.wire.codec.instance import COMMANDS, REPORTS
from millrace.wire.codec.request_spec import spec_message
from support.deadlines import eventually
from support.memory_transport import MemoryHub
from support.scheduler_peers import register
from support.tiny_models import prompt
from support.worker_roles import LiveRole, config, live_roles, remember, spec

SETTINGS = config(max_chunk_tokens=64)
#: Policies that look at deadlines. These put the tight prompt before the long one,
YIELDING = ("edf", "d_edf", "s_edf", "lrs", "millrace")
#: and to these the long one has less slack for its work.
KEEPING = ("lars", "lars_deadline")


class ScheduledRole(LiveRole):
    """Sends all its reports to a scheduler and takes the scheduler's commands."""

    tell: Callable[[Report], None] | None = None

    def take(self, report: Report) -> None:
        super().take(report)
        assert self.tell is not None
        self.tell(report)

    def told(self, kind: str) -> list[str]:
        """Lists the requests of all messages of a kind, in order."""
        return [message.request_id for said, message in self.messages if said == kind]


class Scheduler:
    """A scheduler's loop without streams."""

    def __init__(self, settings: SchedulerConfig, store: MemoryStore) -> None:
        self.loop = SchedulerLoop(settings, Recorder(store), Registry())
        self.store = store
        self.commands: list[Command] = []

    async def serve(self, *roles: ScheduledRole) -> None:
        await asyncio.gather(
            self.loop.run(), *(self._command(role, self._join(role)) for role in roles)
        )

    def _join(self, role: ScheduledRole) -> Worker:
        message = register(
            role.incarnation.id,
            generation=role.incarnation.generation,
            address=role.address,
            role=role.role.name,
            kv_pages=role.engine.pool.num_pages,
        )
        card = codec.joined(message)
        worker = Worker(card=card, address=message.address, seen_s=self.loop.clock())
        self.loop.post_now(card, worker)

        def tell(said: Report) -> None:
            report = REPORTS.decode(REPORTS.encode(said))
            assert report is not None
            event = Reported(
                instance_id=card.instance_id, generation=card.generation, report=report
            )
            self.loop.post_now(event)

        role.tell = tell
        return worker

    async def _command(self, role: ScheduledRole, worker: Worker) -> None:
        while True:
            for sent in await worker.outbox.take():
                command = COMMANDS.decode(codec.command_message(sent))
                assert command is not None
                self.commands.append(command)
                role.role.on_command(command)

    def told(self, kind: type[Command]) -> bool:
        """Whether an instance was sent such a command."""
        return any(isinstance(command, kind) for command in self.commands)

    async def submit(self, request_id: str, tokens: int, ttft_s: float) -> None:
        asked = replace(spec(request_id, tokens), slo=Slo(ttft_s=ttft_s))
        await remember(self.store, asked, prompt(tokens))
        wanted = spec_message(asked)
        request = codec.request(wanted, proxy_id="x", now_s=time.monotonic())
        await self.loop.post(Submitted(request=request), wanted.SerializeToString())


@asynccontextmanager
async def served(policy: str, preemption: str) -> AsyncIterator[tuple[Scheduler, ScheduledRole]]:
    store, hub = MemoryStore(SETTINGS.store), MemoryHub()
    shared: dict[str, Any] = {"hub": hub, "store": store}
    prefill = ScheduledRole(PrefillRole, SETTINGS, name="prefill-0", **shared)
    decode = ScheduledRole(DecodeRole, SETTINGS, name="decode-0", **shared)
    scheduler = Scheduler(SchedulerConfig(policy=policy, preemption=preemption), store)
    async with live_roles(prefill, decode):
        serving = asyncio.create_task(scheduler.serve(prefill, decode))
        await asyncio.sleep(0)  # both have joined
        try:
            yield scheduler, prefill
            await eventually(lambda: not scheduler.loop.machine.requests)
            scheduler.loop.machine.check_integrity()
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving  # raises its error


@pytest.mark.parametrize("preemption", ["none", "operator"])
@pytest.mark.parametrize(
    "policy",
    ["fcfs", "lars", "millrace"]
    + [pytest.param(p, marks=pytest.mark.slow) for p in (*KEEPING[1:], *YIELDING[:-1])],
)
async def test_what_the_policy_puts_first_is_computed_first(policy: str, preemption: str) -> None:
    async with served(policy, preemption) as (scheduler, prefill):
        yields = preemption == "operator" and policy in YIELDING
        with prefill.held_before_the_last_chunk("long"):
            await scheduler.submit("long", 300, 30)
            await prefill.said("chunk_started", "long")
            await scheduler.submit("loose", 40, 90)
            await scheduler.submit("tight", 40, 5)
            if policy != "fcfs":
                await eventually(lambda: scheduler.told(Order))
            if yields:
                await prefill.said("chunk_suspended", "long")
        for name in ("loose", "tight"):
            await prefill.said("request_released", name)
    started = prefill.told("chunk_started")
    if policy == "fcfs":
        assert started == ["long", "loose", "tight"]
        assert not scheduler.told(Order)
    else:
        assert list(dict.fromkeys(started)) == ["long", "tight", "loose"]
    if yields:
        assert prefill.told("chunk_suspended") == ["long"]
        assert prefill.told("chunk_finished") == ["tight", "long", "loose"]
    else:
        assert prefill.told("chunk_suspended") == []
        assert prefill.told("chunk_finished") == list(dict.fromkeys(started))
