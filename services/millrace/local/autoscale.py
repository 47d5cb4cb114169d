"""Autoscales live pools: reads the load, asks `core.autoscale.rules` for sizes, and sets them.

A `Connector` starts and stops a pool's instances; in `millrace up --autoscale` these are processes.
One loop checks the instances, continues started drains, and decides once per interval. It is
level-triggered: an action that failed is tried again at the next check, and the scheduler or an
instance may die at any time.

A leaving instance is cordoned first, and ended once the scheduler reports that it holds no
requests.
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

#: Seconds between two checks of draining instances.
LOOK_EVERY_S = 0.25
#: Seconds from an eviction until an instance is ended, even if it still holds requests.
EVICTION_S = 15.0


class Connector(Protocol):
    """Starts and stops the instances of one pool, of any kind. Every call returns at once."""

    role: str

    def instances(self) -> Sequence[str]:
        """Returns the ids of started instances without a call of `stop`, oldest first.

        An instance that failed to start is left out; an instance that died and is restarted is
        included.
        """

    def start(self) -> str:
        """Starts one more instance and returns its id, which no instance had before."""

    def stop(self, instance_id: str) -> None:
        """Ends an instance for good. It may finish its requests."""


class Scheduler(Protocol):
    """The calls to a scheduler that autoscaling needs. All raise SchedulerUnavailable."""

    async def get_load(self) -> FleetLoad: ...

    async def get_instances(self) -> Sequence[InstanceView]: ...

    async def set_cordon(self, instance_id: str, cordoned: bool) -> None:
        """Cordons or uncordons an instance. Raises UnknownInstance."""

    async def evict(self, instance_id: str) -> None:
        """Ends an instance's requests here: they are migrated. Raises UnknownInstance."""


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
    """One decision of a pool's autoscaler, with its input; `size` is the pool's size before."""

    at_s: float  # monotonic
    role: str
    size: int
    metrics: PoolMetrics
    recommendation: Recommendation

    def __str__(self) -> str:
        """Returns a line for users: 'prefill 1 -> 2: backlog of 6.1 s an instance, target 4'."""
        found = self.recommendation
        return f"{self.role} {self.size} -> {found.replicas}: {found.reason}"


@dataclass(slots=True)
class _Drain:
    """The state of an instance that is leaving."""

    since_s: float
    evicted: bool = False


class Pool:
    """Brings the instances of a connector to a size, and loses no request on the way.

    `told` gets a line for each change of an instance that a user wants to know.
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
        self._cordoned: set[str] = set()  # cordoned by this pool, and not uncordoned again
        self._held: dict[str, int] = {}  # requests at registered instances, by the last check

    @property
    def size(self) -> int:
        """Returns the number of instances that take work or will: draining instances don't
        count.
        """
        return len(self._staying())

    def resize(self, size: int, now_s: float) -> None:
        """Starts instances, or drains some; running drains are cancelled first."""
        for _ in range(self.size, size):
            if self._drains:
                fullest = max(self._drains, key=lambda name: self._held.get(name, 0))
                del self._drains[fullest]
            else:
                self.connector.start()
        for _ in range(size, self.size):
            self._drains[self._least_held()] = _Drain(since_s=now_s)

    async def settle(self, instances: Mapping[str, InstanceView] | None, now_s: float) -> None:
        """Continues cordons and drains. `instances` is None when the scheduler does not answer."""
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
        """Returns whether an instance may end. An instance that the scheduler does not know holds
        nothing.
        """
        if view is None or (view.draining and not view.held_requests):
            return True
        if not view.draining:
            await self._set_cordon(name, cordoned=True)
        elif overdue_s >= 0 and not drain.evicted:
            self._told(
                f"{name} did not drain in {self._drain_timeout_s:g} s: its work "
                f"({view.held_requests} requests) is migrated"
            )
            await self._scheduler.evict(name)
            drain.evicted = True
        return overdue_s >= EVICTION_S

    async def _set_cordon(self, name: str, *, cordoned: bool) -> None:
        # Noted before the call's result is known: uncordoning one instance too many is harmless.
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
        """Returns an unregistered instance, else the one with the fewest requests; among equals the
        youngest.
        """
        youngest_first = reversed(self._staying())
        return min(youngest_first, key=lambda name: self._held.get(name, -1))


class Autoscale:
    """Runs the loop over all pools of one scheduler. `decided` gets every decision."""

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
        """Continues started drains, and decides again when the interval is over."""
        instances = await self._instances()
        for pool in self.pools:
            with contextlib.suppress(SchedulerUnavailable, UnknownInstance):  # checked again
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
        """Decides each pool's size. An old load is used, too: autoscalers know its age."""
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
