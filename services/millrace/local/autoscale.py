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

from millrace.core.autoscale import drain
from millrace.core.autoscale.load import FleetLoad
from millrace.core.autoscale.rules import AutoscaleConfig, Autoscaler, PoolMetrics, Recommendation
from millrace.wire.clients import scheduler_client
from millrace.wire.clients.scheduler_client import (
    InstanceView,
    SchedulerUnavailable,
    UnknownInstance,
)

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

    `core.autoscale.drain` decides which instances leave, and how. `report` gets a line for each
    change of an instance that a user wants to know.
    """

    def __init__(
        self,
        connector: Connector,
        scheduler: Scheduler,
        config: AutoscaleConfig,
        *,
        drain_timeout_s: float,
        report: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.connector = connector
        self.scaler = Autoscaler(config)
        self._scheduler = scheduler
        self._policy = drain.DrainPolicy(timeout_s=drain_timeout_s, eviction_s=EVICTION_S)
        self._report = report
        self._drains: dict[str, _Drain] = {}
        self._cordoned: set[str] = set()  # cordoned by this pool, and not uncordoned again
        self._views: Mapping[str, InstanceView] = {}  # the last answer of the scheduler

    @property
    def draining(self) -> frozenset[str]:
        """Returns the ids of the instances that are leaving."""
        return frozenset(self._drains)

    @property
    def size(self) -> int:
        """Returns the number of instances that take work or will: draining instances don't
        count.
        """
        return sum(name not in self._drains for name in self.connector.instances())

    def resize(self, size: int, now_s: float) -> None:
        """Starts instances, or drains some; running drains are cancelled first."""
        change = drain.resize(self._instances(self._views), size)
        for name in change.stay:
            del self._drains[name]
        for name in change.leave:
            self._drains[name] = _Drain(since_s=now_s)
        for _ in range(change.start):
            self.connector.start()

    async def settle(self, instances: Mapping[str, InstanceView] | None, now_s: float) -> None:
        """Continues cordons and drains. `instances` is None when the scheduler does not answer.

        Raises SchedulerUnavailable.
        """
        known = set(self.connector.instances())
        self._cordoned &= known
        self._drains = {name: one for name, one in self._drains.items() if name in known}
        answers = instances is not None
        self._views = self._views if instances is None else instances
        now = reversed(self._instances(instances or {}))  # the youngest goes first
        for action in drain.drain_actions(now, self._policy, now_s, scheduler_answers=answers):
            with contextlib.suppress(UnknownInstance):  # checked again
                await self._carry_out(action, now_s, answers)

    def _instances(self, views: Mapping[str, InstanceView]) -> list[drain.Instance]:
        return [self._instance(name, views.get(name)) for name in self.connector.instances()]

    def _instance(self, name: str, view: InstanceView | None) -> drain.Instance:
        """Returns the rule's input. An unregistered process is not ready: it starts, or ends its
        requests by itself at SIGTERM.
        """
        leaving = self._drains.get(name)
        return drain.Instance(
            id=name,
            ready=view is not None,
            leaves_since_s=None if leaving is None else leaving.since_s,
            registration=None
            if view is None
            else drain.Registration(cordoned=view.draining, held_requests=view.held_requests),
            cordon_is_own=name in self._cordoned,
        )

    async def _carry_out(self, action: drain.Action, now_s: float, answers: bool) -> None:
        name = action.instance_id
        match action:
            case drain.Remove():
                waited = f"drained in {now_s - self._drains.pop(name).since_s:.1f} s"
                self.connector.stop(name)
                self._report(
                    f"{name} goes: {waited if answers else 'the scheduler does not answer'}"
                )
            case drain.Uncordon():
                await self._scheduler.set_cordon(name, False)
                self._cordoned.discard(name)
            case drain.Cordon():
                # Noted before the call's result is known: an uncordon too many is harmless.
                self._cordoned.add(name)
                await self._scheduler.set_cordon(name, True)
            case drain.Evict() if name in self._drains and not self._drains[name].evicted:
                await self._scheduler.evict(name)
                self._drains[name].evicted = True
                self._report(
                    f"{name} did not drain in {self._policy.timeout_s:g} s: its work "
                    f"({self._views[name].held_requests} requests) is migrated"
                )


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
            await self.check(time.monotonic())
            await asyncio.sleep(min(LOOK_EVERY_S, self._interval_s))

    async def check(self, now_s: float) -> None:
        """Continues started drains, and decides again when the interval is over."""
        instances = await self._instances()
        for pool in self.pools:
            with contextlib.suppress(SchedulerUnavailable):  # checked again
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
