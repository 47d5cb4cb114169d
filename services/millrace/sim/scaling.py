"""Autoscaling: drives `core.autoscale.rules` with the cluster's metrics; applies its targets.

A new instance takes work `start_s` after it was asked for (pod start-up, weights), though its GPUs
count from then on. When a pool has too many instances, the instance that holds least is drained
first; it leaves when it is idle. Instances that still start are given up before any is drained.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from millrace.core.autoscale.load import PoolLoad
from millrace.core.autoscale.load_meter import LoadMeter
from millrace.core.autoscale.rules import Autoscaler, PoolMetrics
from millrace.core.scheduler import events
from millrace.core.scheduler.effects import Effect
from millrace.core.scheduler.fleet.instances import Instance
from millrace.core.scheduler.machine import Machine
from millrace.core.scheduler.reports import Draining
from millrace.sim.cluster.spec import AutoscalePlan
from millrace.sim.cluster.world import World
from millrace.sim.fleet import Fleet, role_of
from millrace.sim.results.counters import ScaleEvent

#: Between two checks whether a draining instance is idle.
DRAIN_POLL_S = 1.0


class Scaling:
    """All pools that a plan names. Once `over`, nothing scales any more."""

    def __init__(self, world: World, fleet: Fleet, machine: Machine, plan: AutoscalePlan) -> None:
        self.over = False
        self._world = world
        self._clock = world.clock
        self._fleet = fleet
        self._machine = machine
        self._plan = plan
        self._scalers = {
            role: Autoscaler(config)
            for role, config in (
                ("prefill", plan.prefill),
                ("decode", plan.decode),
                ("mixed", plan.mixed),
            )
            if config is not None
        }
        self._starting: dict[str, list[str]] = {role: [] for role in self._scalers}
        self._joining: set[str] = set()  # started, and the scheduler may not know of it yet
        self._draining: dict[str, int] = {}  # id -> the generation that must end
        self._names = {
            role: sum(role_of(instance_id) == role for instance_id in world.spec.instance_ids)
            for role in self._scalers
        }
        self._meter = LoadMeter(machine, self._clock.now_s, plan.interval_s)
        self._clock.at(plan.interval_s, self._look)

    # ---- metrics

    def saw(self, event: events.Event, effects: Iterable[Effect]) -> None:
        """Takes in one step of the machine, right after it."""
        self._meter.saw(event, effects, self._clock.now_s)

    def _metrics(self, role: str, load: PoolLoad) -> PoolMetrics:
        """Returns the metrics. The machine may not know yet of instances that join or drain."""
        known, ready = self._known(role), self._ready(role)
        self._joining.difference_update(self._machine.cluster.instances)
        joining = sum(role_of(instance_id) == role for instance_id in self._joining)
        return replace(load, ready=len(ready), draining=len(known) - len(ready)).metrics(
            sampled_s=self._clock.now_s,
            parked_requests=0,
            size=len(ready) + len(self._starting[role]) + joining,
        )

    def _known(self, role: str) -> list[Instance]:
        """Returns the pool's instances as the scheduler knows them."""
        instances = self._machine.cluster.instances.values()
        return [instance for instance in instances if instance.card.role == role]

    def _ready(self, role: str) -> list[Instance]:
        """Returns those of them that keep taking work."""
        return [
            instance
            for instance in self._known(role)
            if not instance.draining and instance.id not in self._draining
        ]

    # ---- actions

    def _look(self, nothing: None) -> None:
        del nothing
        if self.over:
            return
        load = self._meter.load(self._clock.now_s)
        for role, scaler in self._scalers.items():
            metrics = self._metrics(role, load.of(role))
            target = scaler.step(metrics, self._clock.now_s).replicas
            if target != metrics.capacity:
                self._world.tally.scale_events.append(
                    ScaleEvent(
                        at_s=self._clock.now_s, pool=role, instances=metrics.ready, target=target
                    )
                )
            for _ in range(metrics.capacity, target):
                self._start(role)
            for _ in range(target, metrics.capacity):
                self._shrink(role)
        self._clock.at(self._clock.now_s + self._plan.interval_s, self._look)

    def _start(self, role: str) -> None:
        instance_id = f"{role[0]}{self._names[role]}"
        self._names[role] += 1
        self._starting[role].append(instance_id)
        self._clock.at(self._clock.now_s + self._plan.start_s, self._started, instance_id)

    def _started(self, instance_id: str) -> None:
        role = role_of(instance_id)
        if self.over or instance_id not in self._starting[role]:
            return
        self._starting[role].remove(instance_id)
        self._joining.add(instance_id)
        self._world.tally.alive(role, self._plan.start_s)
        self._world.outbox.append(self._fleet.join(instance_id))

    def _shrink(self, role: str) -> None:
        if self._starting[role]:
            self._starting[role].pop()
            return
        ready = self._ready(role)
        if not ready:
            return
        least = min(ready, key=lambda instance: (len(instance.holdings), instance.id))
        if not self._draining:
            self._clock.at(self._clock.now_s + DRAIN_POLL_S, self._poll)
        self._draining[least.id] = least.card.generation
        self._world.report(least.id, least.card.generation, Draining())

    def _poll(self, nothing: None) -> None:
        """Removes draining instances that are idle, and for which the scheduler has no work."""
        del nothing
        if self.over:
            return
        for instance_id in list(self._draining):
            known = self._machine.cluster.instances.get(instance_id)
            if known is None or self._fleet.generation(instance_id) != self._draining[instance_id]:
                del self._draining[instance_id]  # it died, and may be back
            elif known.draining and not known.holdings and self._fleet.is_idle(instance_id):
                del self._draining[instance_id]
                self._fleet.leave(instance_id)
        if self._draining:
            self._clock.at(self._clock.now_s + DRAIN_POLL_S, self._poll)
