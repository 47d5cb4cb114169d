"""A stack that is done harm to while its answers are in a chosen phase."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

from millrace.bench.common.lasting_answer import LastingAnswer
from millrace.local.stack import Stack
from millrace.wire.clients.scheduler_client import (
    InstanceView,
    SchedulerUnavailable,
    UnknownRequest,
    explain,
    get_instances,
)
from support.deadlines import HANG_S
from support.live_stack import busiest, eventually, leader_of, lease_of, slowed

Asked = tuple[str, dict[str, Any]]  # path and body
LATE = "late"  # the name of the answer that comes after the fault


@dataclass(frozen=True)
class Victim:
    """A process to be harmed, and who leads before that."""

    service: str  # its name in the stack, or "store"
    pid: int
    epoch: int
    leader: str
    leader_pid: int


@dataclass
class Scene:
    """A stack, the answers that are asked for, and their undisturbed content.

    `asked`: path and body by name. A case has one of them as its `target`, of which the phases
    speak; those of `beside` run beside it.
    """

    stack: Stack
    client: httpx.AsyncClient
    asked: Mapping[str, Asked]
    beside: Sequence[str]
    store_pid: int | None = None  # of a store that is not the stack's own
    target: str = ""
    undisturbed: dict[str, Any] = field(default_factory=dict)
    pages: dict[str, int] = field(default_factory=dict)  # free ones, by instance, without work
    frozen: set[int] = field(default_factory=set)
    answers: dict[str, LastingAnswer] = field(default_factory=dict)
    reading: dict[str, asyncio.Task[LastingAnswer]] = field(default_factory=dict)

    async def begin(self) -> None:
        """Has every answer once, alone, and remembers the fleet without work."""
        for name in self.asked:
            self.send(name)
            answer = await self.reading.pop(name)
            assert answer.finish and not answer.error, (name, answer)
            self.undisturbed[name] = answer.content
        self.answers.clear()
        await eventually(self.is_idle)
        self.pages = {one.id: one.free_pages for one in await self.instances()}

    # ---- the answers

    def send(self, name: str) -> LastingAnswer:
        """Begins to read an answer."""
        path, body = self.asked[name]
        answer = LastingAnswer(path, {"model": "tiny", **body})
        self.answers[name] = answer
        self.reading[name] = asyncio.create_task(answer.read(self.client, silence_s=2 * HANG_S))
        return answer

    def send_others(self) -> None:
        """Begins the answers beside the target."""
        for name in self.beside:
            self.send(name)

    async def progress(self, answer: LastingAnswer) -> dict[str, Any]:
        """What `GET /v1/requests` says of the answer; empty before it is known."""
        response = await self.client.get(f"/v1/requests/{answer.chosen_id}")
        return response.json() if response.status_code == httpx.codes.OK else {}

    async def state(self, answer: LastingAnswer) -> str:
        """The answer's state as the scheduler sees it; empty if it does not know it."""
        if found := await self.progress(answer):
            with suppress(UnknownRequest, SchedulerUnavailable):
                return (await explain(self.stack.scheduler_address, found["id"])).state
        return ""

    async def end(self) -> list[LastingAnswer]:
        """Waits for all answers, each of which must be as in the undisturbed run."""
        found = await asyncio.gather(*self.reading.values())
        for name, answer in zip(self.reading, found, strict=True):
            said = answer.error or answer.interruptions or answer.forgotten
            assert not said, f"{name} ({answer.chosen_id}): {said}"
            alone = self.undisturbed[name]
            difference = f"{name} ({answer.chosen_id}): {answer.content}, undisturbed {alone}"
            assert answer.content == alone, difference
        return found

    async def give_up(self) -> None:
        """Forgets the answers, those under way too, and lets all processes go on."""
        self.go_on()
        for task in self.reading.values():
            task.cancel()
        await asyncio.gather(*self.reading.values(), return_exceptions=True)
        self.reading.clear()
        self.answers.clear()

    # ---- the processes

    def pids(self, role: str) -> set[int]:
        """The processes of a role."""
        found = (self.stack.services[name].serving_pid for name in self.stack.instances(role))
        return {pid for pid in found if pid is not None}

    def pid(self, service: str) -> int | None:
        """The process of a service, or of the store; None while it does not serve."""
        if service == "store":
            return self.store_pid or self.stack.redis_pid
        return self.stack.services[service].serving_pid

    def freeze(self, pids: Iterable[int]) -> None:
        """Stops processes until `go_on`."""
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
            self.frozen.add(pid)

    def go_on(self, pids: Iterable[int] | None = None) -> None:
        """Lets frozen processes go on; None: all of them."""
        for pid in set(self.frozen if pids is None else pids):
            self.frozen.discard(pid)
            signal_to(pid, signal.SIGCONT)

    async def victim(self, service: str) -> Victim:
        """The process of a service that has most to do with the answers under way."""
        lease, leader = await lease_of(self.stack), await leader_of(self.stack)
        name = leader.name if service == "scheduler" else service
        if service in self.stack.options.fleet:
            await eventually(lambda: self._holds(service), what=f"{service} holds nothing")
            name = await busiest(self.stack, service)
        pid, leader_pid = self.pid(name), self.pid(leader.name)
        assert pid is not None and leader_pid is not None
        return Victim(name, pid, lease.epoch, leader.name, leader_pid)

    # ---- the fleet

    async def instances(self) -> list[InstanceView]:
        """The fleet as the scheduler sees it; empty while no scheduler leads."""
        with suppress(SchedulerUnavailable):
            return await get_instances(self.stack.scheduler_address)
        return []

    async def noticed(self, victim: Victim) -> bool:
        """Whether the others treat a frozen process as one that is lost."""
        if victim.service.startswith("scheduler"):
            lease = await lease_of(self.stack)
            return lease.epoch > victim.epoch and lease.left_s > 0
        there = await self.instances()
        if victim.service == "proxy":  # its requests are ended or cancelled
            return bool(there) and not any(one.held_requests for one in there)
        if victim.service == "store":
            path, body = self.asked[LATE]
            response = await self.client.post(path, json={"model": "tiny", **body})
            return response.status_code == httpx.codes.SERVICE_UNAVAILABLE
        return bool(there) and victim.service not in {one.id for one in there}

    async def replaced(self, victim: Victim) -> None:
        """Returns when another process has the victim's place."""
        await eventually(lambda: self._is_new(victim.service, victim.pid))

    async def whole(self, victim: Victim) -> None:
        """Returns when every service runs, and nobody holds anything of a request."""
        await eventually(lambda: self._is_led(victim), what="one scheduler leads")
        services = self.stack.services.values()
        await eventually(
            lambda: self.pid("store") and all(one.serving_pid for one in services),
            what="every service runs",
        )
        await eventually(self.is_idle, what="the fleet is as it was")

    async def _is_led(self, victim: Victim) -> bool:
        """Whether one leads; if it is another one, the former leader has ended its process."""
        lease = await lease_of(self.stack)
        if lease.left_s <= 0:
            return False
        return lease.epoch == victim.epoch or self._is_new(victim.leader, victim.leader_pid)

    def _is_new(self, service: str, pid: int) -> bool:
        return self.pid(service) not in (None, pid)

    async def _holds(self, role: str) -> bool:
        return any(one.role == role and one.held_requests for one in await self.instances())

    async def is_complete(self) -> bool:
        """Whether the scheduler has all instances."""
        names = {name for role in self.stack.options.fleet for name in self.stack.instances(role)}
        return {one.id for one in await self.instances()} == names

    async def is_idle(self) -> bool:
        """Whether all is as it was before the first request."""
        there = await self.instances()
        free = {one.id: one.free_pages for one in there}
        return (
            await self.is_complete()
            and (not self.pages or free == self.pages)
            and not any(one.draining or one.held_requests for one in there)
            and (await self.client.get("/ready")).status_code == httpx.codes.OK
        )


def signal_to(pid: int, number: signal.Signals) -> None:
    """Sends a signal; nothing if the process has ended."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


# ---- phases: each says whether the target is there; what would carry it further is frozen

Phase = Callable[[Scene], Awaitable[bool]]


async def queued(scene: Scene) -> bool:
    """Accepted, and no prefill instance knows of it."""
    scene.freeze(scene.pids("prefill"))
    scene.send_others()
    await eventually(lambda: _all_known(scene))
    scene.send(scene.target)
    await eventually(lambda: _is(scene, "queued"))
    return True


async def mid_prefill(scene: Scene) -> bool:
    """Some chunks are computed, and some are not."""
    pids = scene.pids("prefill")
    scene.frozen |= pids
    async with slowed(list(pids)):
        scene.send(scene.target)
        scene.send_others()
        await eventually(lambda: _has_computed(scene))
    return await _is(scene, "prefilling")


async def mid_ring(scene: Scene) -> bool:
    """As `mid_prefill`, by a group of all prefill instances."""
    pids = scene.pids("prefill")
    scene.frozen |= pids
    async with slowed(list(pids)):
        scene.send(scene.target)
        await eventually(lambda: _has_computed(scene))
        members = [one for one in await scene.instances() if one.role == "prefill"]
        in_ring = await _is(scene, "prefilling") and all(one.held_requests for one in members)
        scene.send_others()
        await eventually(lambda: _all_known(scene))
    return in_ring and await _is(scene, "prefilling")


async def mid_transfer(scene: Scene) -> bool:
    """All chunks are computed, and decode, which has pages for the KV, has not taken it over."""
    if not await mid_prefill(scene):
        return False
    prefill = set(scene.frozen)
    scene.freeze(scene.pids("decode"))
    scene.go_on(prefill)
    await eventually(lambda: _is_beyond_prefill(scene))
    return await _is(scene, "transferring")


async def mid_decode(scene: Scene) -> bool:
    """Its client has some tokens, and most of them are to come."""
    return await _decoding(scene, lambda answer: len(answer.token_ids) >= 5)


async def mid_tool_call(scene: Scene) -> bool:
    """Its client has the beginning of a tool call's arguments."""
    return await _decoding(scene, lambda answer: len(answer.arguments) >= 5)


async def _decoding(scene: Scene, check: Callable[[LastingAnswer], bool]) -> bool:
    pids = scene.pids("decode")
    scene.frozen |= pids
    async with slowed(list(pids)):
        target = scene.send(scene.target)
        scene.send_others()
        await eventually(lambda: check(target))
    return await _is(scene, "decoding")


async def _all_known(scene: Scene) -> bool:
    return all([await scene.state(answer) for answer in scene.answers.values()])


async def _is(scene: Scene, state: str) -> bool:
    return await scene.state(scene.answers[scene.target]) == state


async def _has_computed(scene: Scene) -> bool:
    return bool((await scene.progress(scene.answers[scene.target])).get("computed_tokens"))


async def _is_beyond_prefill(scene: Scene) -> bool:
    """Also when decode is lost: then it will never be."""
    return not await _is(scene, "prefilling") or not await scene.is_complete()


# ---- faults: each is over, and the service is there again, at the end of its block

Fault = Callable[[Scene, Victim], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def killed(scene: Scene, victim: Victim) -> AsyncIterator[None]:
    """SIGKILL; it is started again."""
    signal_to(victim.pid, signal.SIGKILL)
    yield
    await scene.replaced(victim)


@asynccontextmanager
async def emptied(scene: Scene, victim: Victim) -> AsyncIterator[None]:
    """SIGKILL of the store, and the loss of its data."""
    assert scene.stack.redis_data is not None
    shutil.rmtree(scene.stack.redis_data)
    async with killed(scene, victim):
        yield


@asynccontextmanager
async def restarted(scene: Scene, victim: Victim) -> AsyncIterator[None]:
    """SIGTERM, as a rolling update does: it ends what it must, and is started again."""
    signal_to(victim.pid, signal.SIGTERM)
    yield
    await scene.replaced(victim)


@asynccontextmanager
async def paused(scene: Scene, victim: Victim) -> AsyncIterator[None]:
    """SIGSTOP, until the others have noticed; then it goes on."""
    signal_to(victim.pid, signal.SIGSTOP)
    scene.frozen.discard(victim.pid)
    going_on = asyncio.create_task(_go_on_when_noticed(scene, victim))
    try:
        yield
        await going_on
    finally:
        going_on.cancel()
        signal_to(victim.pid, signal.SIGCONT)


async def _go_on_when_noticed(scene: Scene, victim: Victim) -> None:
    await eventually(lambda: scene.noticed(victim), what="nobody notices")
    signal_to(victim.pid, signal.SIGCONT)


@asynccontextmanager
async def starved(scene: Scene, victim: Victim) -> AsyncIterator[None]:
    """It has a tenth of its time until the answers have ended."""
    scene.frozen.discard(victim.pid)
    try:
        async with slowed([victim.pid]):
            yield
    finally:
        signal_to(victim.pid, signal.SIGCONT)


async def reach(scene: Scene, phase: Phase) -> None:
    """Brings the target into the phase. Tries again when the target was too fast, or, as may happen
    on a busy machine, when an instance that was slow was taken for dead.
    """
    while not (await phase(scene) and await scene.is_complete()):
        await scene.give_up()
        await eventually(scene.is_idle)


async def endure(scene: Scene, target: str, phase: Phase, service: str, fault: Fault) -> float:
    """Does the harm in the phase. Every answer is as in the undisturbed run, also one that comes
    after the fault, and then the fleet is as it was.

    Returns the longest pause of an answer that was under way, in seconds.
    """
    scene.target = target
    await eventually(scene.is_idle, what="the fleet is as it was")
    try:
        await reach(scene, phase)
        victim = await scene.victim(service)
        under_way = list(scene.answers.values())
        async with fault(scene, victim):
            for answer in under_way:
                answer.watch()
            scene.go_on()
            scene.send(LATE)
            await scene.end()
        await scene.whole(victim)
        return max(answer.longest_pause_s for answer in under_way)
    finally:
        await scene.give_up()
