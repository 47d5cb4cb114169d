"""Autoscaling live: asks for load, lets `core.autoscale.rules` decide, sets pools' sizes.

What a pool's instances are made of stands behind `Connector`; `millrace up --autoscale` has
processes there. One loop looks at the instances, carries on what was begun, and once an interval
decides anew. Everything is level-triggered: what could not be done now is found again at the next
look, and the scheduler or an instance may die at any time.

An instance that is to go is cordoned first and ended once the scheduler says that it holds nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from millrace.core.autoscale.load import FleetLoad
from millrace.core.autoscale.rules import AutoscaleConfig, Autoscaler, PoolMetrics, Recommendation
from millrace.wire import scheduler_client
from millrace.wire.scheduler_client import InstanceView, SchedulerUnavailable, UnknownInstance

log = logging.getLogger(__name__)

#: Between two looks at what drains.
LOOK_EVERY_S = 0.25
#: From an eviction until an instance is ended, whatever the scheduler says that it holds.
EVICTION_S = 15.0


class Connector(Protocol):
    """The instances of one pool, whatever they are made of. Every call returns at once."""

    role: str

    def instances(self) -> Sequence[str]:
        """Ids of those that were asked for and not told to stop, oldest first.

        One that could not be started is not among them any more; one that died and comes back is.
        """

    def start(self) -> str:
        """Asks for one more, with an id that none had before; returns it."""

    def stop(self, instance_id: str) -> None:
        """Ends one for good. It may finish what it has."""


class Scheduler(Protocol):
    """The calls to a scheduler that scaling needs. All raise SchedulerUnavailable."""

    async def get_load(self) -> FleetLoad: ...

    async def get_instances(self) -> Sequence[InstanceView]: ...

    async def set_cordon(self, instance_id: str, cordoned: bool) -> None:
        """Raises UnknownInstance."""

    async def evict(self, instance_id: str) -> None:
        """What it holds goes on elsewhere. Raises UnknownInstance."""


@dataclass(frozen=True, slots=True)
class SchedulerAt:
    """A scheduler by its address, host:port."""

    address: str

    async def get_load(self) -> FleetLoad:
        return await scheduler_client.get_load(self.address)

    async def get_instances(self) -> Sequence[InstanceView]:
        return await scheduler_client.get_instances(self.address)

    async def set_cordon(self, instance_id: str, cordoned: bool) -> None:
        await scheduler_client.set_cordon(self.address, instance_id, cordoned)

    async def evict(self, instance_id: str) -> None:
        await scheduler_client.evict(self.address, instance_id, abort=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What one step of a pool's autoscaler saw and said; `size` is what the pool had before."""

    at_s: float  # monotonic
    role: str
    size: int
    metrics: PoolMetrics
    recommendation: Recommendation

    def __str__(self) -> str:
        """A line for people: 'prefill 1 -> 2: backlog of 6.1 s an instance, target 4'."""
        found = self.recommendation
        return f"{self.role} {self.size} -> {found.replicas}: {found.reason}"


@dataclass(slots=True)
class _Drain:
    """An instance that is to go."""

    since_s: float
    evicted: bool = False


class Pool:
    """Brings the instances of a connector to a size, and loses no request on the way.

    told: gets a line when something happens to an instance that people would want to know.
    """

    def __init__(
        self,
        connector: Connector,
        scheduler: Scheduler,
        config: AutoscaleConfig,
        *,
        drain_timeout_s: float,
        told: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.connector = connector
        self.scaler = Autoscaler(config)
        self._scheduler = scheduler
        self._drain_timeout_s = drain_timeout_s
        self._told = told
        self._drains: dict[str, _Drain] = {}
        self._cordoned: set[str] = set()  # by this pool, and not lifted again
        self._held: dict[str, int] = {}  # requests at registered instances, by the last look

    @property
    def size(self) -> int:
        """Instances that take work or will: what drains is not among them."""
        return len(self._staying())

    def resize(self, size: int, now_s: float) -> None:
        """Starts instances, or tells some to go; a drain that is under way is undone first."""
        for _ in range(self.size, size):
            if self._drains:
                fullest = max(self._drains, key=lambda name: self._held.get(name, 0))
                del self._drains[fullest]
            else:
                self.connector.start()
        for _ in range(size, self.size):
            self._drains[self._least_held()] = _Drain(since_s=now_s)

    async def settle(self, instances: Mapping[str, InstanceView] | None, now_s: float) -> None:
        """Carries on with cordons and drains. `instances` None: the scheduler does not answer."""
        known = set(self.connector.instances())
        self._cordoned &= known
        self._drains = {name: drain for name, drain in self._drains.items() if name in known}
        if instances is not None:
            self._held = {n: v.held_requests for n, v in instances.items() if n in known}
        for name, drain in list(self._drains.items()):
            overdue_s = now_s - drain.since_s - self._drain_timeout_s
            if instances is None:
                if overdue_s >= 0:
                    self._stop(name, "the scheduler does not answer")
            elif await self._has_drained(drain, name, instances.get(name), overdue_s):
                self._stop(name, f"drained in {now_s - drain.since_s:.1f} s")
        for name in self._cordoned - self._drains.keys():
            view = None if instances is None else instances.get(name)
            if view is not None and view.draining:
                await self._set_cordon(name, cordoned=False)

    async def _has_drained(
        self, drain: _Drain, name: str, view: InstanceView | None, overdue_s: float
    ) -> bool:
        """Whether an instance may end. What the scheduler has no news of holds nothing."""
        if view is None or (view.draining and not view.held_requests):
            return True
        if not view.draining:
            await self._set_cordon(name, cordoned=True)
        elif overdue_s >= 0 and not drain.evicted:
            self._told(
                f"{name} did not drain in {self._drain_timeout_s:g} s: what it holds "
                f"({view.held_requests}) goes on elsewhere"
            )
            await self._scheduler.evict(name)
            drain.evicted = True
        return overdue_s >= EVICTION_S

    async def _set_cordon(self, name: str, *, cordoned: bool) -> None:
        # Noted before it is known to have come about: lifting one too many harms nobody.
        self._cordoned.add(name)
        await self._scheduler.set_cordon(name, cordoned)
        if not cordoned:
            self._cordoned.discard(name)

    def _stop(self, name: str, why: str) -> None:
        del self._drains[name]
        self._cordoned.discard(name)
        self.connector.stop(name)
        self._told(f"{name} goes: {why}")

    def _staying(self) -> list[str]:
        return [name for name in self.connector.instances() if name not in self._drains]

    def _least_held(self) -> str:
        """What is not registered yet, then what holds the least; of equals the youngest."""
        youngest_first = reversed(self._staying())
        return min(youngest_first, key=lambda name: self._held.get(name, -1))


class Autoscale:
    """The loop over all pools of one scheduler. decided: gets every decision."""

    def __init__(
        self,
        scheduler: Scheduler,
        pools: Sequence[Pool],
        interval_s: float,
        decided: Callable[[Decision], None] = lambda decision: None,
    ) -> None:
        self.pools = pools
        self._scheduler = scheduler
        self._interval_s = interval_s
        self._decided = decided
        self._next_s = 0.0
        self._load: FleetLoad | None = None
        self._sampled_s = 0.0

    async def run(self) -> None:
        """Scales until it is cancelled."""
        while True:
            await self.look(time.monotonic())
            await asyncio.sleep(min(LOOK_EVERY_S, self._interval_s))

    async def look(self, now_s: float) -> None:
        """Carries on what was begun, and decides anew when that is due."""
        instances = await self._instances()
        for pool in self.pools:
            with contextlib.suppress(SchedulerUnavailable, UnknownInstance):  # the next look sees
                await pool.settle(instances, now_s)
        if now_s >= self._next_s:
            self._next_s = now_s + self._interval_s
            await self._decide(now_s)

    async def _instances(self) -> dict[str, InstanceView] | None:
        try:
            return {view.id: view for view in await self._scheduler.get_instances()}
        except SchedulerUnavailable as error:
            log.warning("scaling waits: %s", error)
            return None

    async def _decide(self, now_s: float) -> None:
        """Old news is better than none: autoscalers know how old it is."""
        with contextlib.suppress(SchedulerUnavailable):
            self._load, self._sampled_s = await self._scheduler.get_load(), now_s
        if self._load is None:
            return
        for pool in self.pools:
            size = pool.size
            metrics = self._load.of(pool.connector.role).metrics(
                sampled_s=self._sampled_s, parked_requests=self._load.parked_requests, size=size
            )
            found = pool.scaler.step(metrics, now_s)
            self._decided(
                Decision(
                    at_s=now_s,
                    role=pool.connector.role,
                    size=size,
                    metrics=metrics,
                    recommendation=found,
                )
            )
            pool.resize(found.replicas, now_s)
