"""The scheduler's loop: receives an event, steps the machine, carries its effects out.

Every change of the scheduler's state passes through one queue, and so do the beginnings and ends of
streams. A command therefore reaches only the incarnation for which it was decided.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from millrace.core.autoscale.load import FleetLoad
from millrace.core.autoscale.load_meter import LoadMeter
from millrace.core.config import SchedulerConfig
from millrace.core.scheduler import commands, events
from millrace.core.scheduler.machine import Machine
from millrace.core.scheduler.reports import Draining
from millrace.core.weights import Weights
from millrace.scheduler.carry_out import CarryOut
from millrace.scheduler.in_force import InForce
from millrace.scheduler.observe.board_feed import BoardFeed
from millrace.scheduler.observe.metrics import SchedulerMetrics
from millrace.scheduler.observe.recording import Recording
from millrace.scheduler.observe.traces import SchedulerTraces
from millrace.scheduler.peers import Proxy, Worker, fleet
from millrace.scheduler.recorder import Recorder
from millrace.scheduler.slow_log import SlowLog
from millrace.scheduler.succession import Estate, Succession
from millrace.state.leader import lease_name
from millrace.telemetry.metrics import Registry
from millrace.wire import fleet_messages as messages

log = logging.getLogger(__name__)

#: The most events in the queue; beyond it, the messages of peers stay unread.
MAX_EVENTS = 16_384


@dataclass(frozen=True, slots=True)
class AllNamed:
    """A proxy has named all requests that it had open when it connected."""

    proxy: Proxy


#: The subject of an event: the peer whose stream began or ended, the request's spec, or the future
#: of the caller that waits for the answer.
Subject = Worker | Proxy | AllNamed | messages.EncodedSpec | asyncio.Future[Any] | None

#: Changes that administrators and the operator ask for; the caller gets the old and new value.
_Change = (
    events.PolicyChanged
    | events.WeightsChanged
    | events.ImprovementRateChanged
    | events.InstanceCordoned
)

_MEMBERSHIP = (events.InstanceJoined, events.InstanceLeft, events.InstanceCordoned)


class SchedulerLoop:
    """Owns the machine, the table of peers and the specs of live requests."""

    def __init__(
        self,
        config: SchedulerConfig,
        recorder: Recorder,
        registry: Registry,
        clock: Callable[[], float] = time.monotonic,
        recording: Recording | None = None,
        weights: Weights | None = None,
        epoch: int = 0,
        estate: Estate | None = None,
    ) -> None:
        """`epoch` stamps all messages. With an inherited `estate` the scheduler takes over."""
        self.config = config
        self.epoch = epoch
        self._lease = lease_name(config.group)
        self.clock = clock
        self.machine = Machine(config)
        self._meter = LoadMeter(self.machine, clock())
        self._step = recording.around(self.machine.step) if recording else self.machine.step
        if weights is not None:
            self._step(events.WeightsChanged(weights=weights), clock())
        estate = estate or Estate()
        self._succession = Succession(estate)
        self._began_s = clock()
        if estate.is_inherited:
            for change in (events.TakeoverBegan(), *estate.changes):
                self._step(change, clock())
        self.workers: dict[str, Worker] = {}
        self._proxies: dict[str, Proxy] = {}
        self._in_force = InForce(self.machine)
        self._slow_log = SlowLog(self.machine)
        self._metrics = SchedulerMetrics(registry, self.machine, recorder, self.load, epoch)
        registry.gauge_function(
            "millrace_scheduler_parked_requests", "requests parked at the proxies", self._parked
        )
        self.board = BoardFeed(self.machine)
        #: Set when a peer has come that the last `note` lacks: the next leader waits for it.
        self.note_changed = asyncio.Event()
        #: Get every step of the machine, immediately after the step.
        self.watching = [self._meter.saw, self.board.saw]
        self.out = CarryOut(
            self.machine, self.workers, self._proxies, self._metrics, recorder, registry, clock
        )
        self._inbox: asyncio.Queue[tuple[events.Event | None, Subject]] = asyncio.Queue()
        self._room = asyncio.Event()
        self._room.set()

    def trace(self, traces: SchedulerTraces) -> None:
        """Traces all requests that are submitted from now on."""
        self.out.traces = traces
        if traces.is_on:
            self.machine.observe_plans(traces.planned)

    # ---- receive, step, carry out

    async def run(self) -> None:
        """Runs the loop until it is cancelled."""
        while True:
            event, subject = await self._inbox.get()
            if self._inbox.qsize() < MAX_EVENTS:
                self._room.set()
            if isinstance(subject, Proxy) and event is None:
                self._meet(subject)
            elif isinstance(subject, AllNamed):
                self._came(proxy_id=subject.proxy.id)
            elif event is not None and self._admissible(event, subject):
                self._take(event)

    async def post(self, event: events.Event, subject: Subject = None) -> None:
        """Queues a peer's message; waits while the queue is full."""
        await self._room.wait()
        self.post_now(event, subject)

    def post_now(self, event: events.Event | None, subject: Subject = None) -> None:
        """Queues a stream's begin or end, or a tick. The core has no event for a proxy's begin."""
        self._inbox.put_nowait((event, subject))
        if self._inbox.qsize() >= MAX_EVENTS:
            self._room.clear()

    def saw(self, epoch: int) -> None:
        """Notes the epoch that a peer has seen (0: none), before it posts the peer's begin."""
        if epoch not in (0, self.epoch) and self._succession.had_former():
            log.warning("a peer had a former leader, of whose instances the store knows nothing")
            self.post_now(events.InstancesForgotten())

    async def set_policy(self, event: events.PolicyChanged) -> str:
        """Changes the policy after all queued events; returns the previous policy."""
        before, _ = await self._change(event)
        return str(before)

    async def set_weights(self, event: events.WeightsChanged) -> None:
        """Changes weights after all queued events."""
        await self._change(event)

    async def set_improvement_rate(
        self, event: events.ImprovementRateChanged
    ) -> tuple[float, float]:
        """Changes the rate after all queued events; returns the previous and the new rate."""
        before, now = await self._change(event)
        return before, now

    async def set_cordon(self, instance_id: str, *, cordoned: bool) -> bool:
        """Cordons or uncordons an instance after all queued events.

        Returns False if the instance is not registered.
        """
        worker = self.workers.get(instance_id)
        if worker is None:
            return False
        _, draining = await self._change(
            events.InstanceCordoned(
                instance_id=worker.id, generation=worker.card.generation, cordoned=cordoned
            )
        )
        return draining is not None

    async def evict(self, instance_id: str, *, abort: bool) -> bool:
        """Cordons an instance and empties it. Returns False if it is not registered."""
        worker = self.workers.get(instance_id)
        cordoned = await self.set_cordon(instance_id, cordoned=True)
        if not cordoned or self.workers.get(instance_id) is not worker:
            return False  # that incarnation ended before the command could be sent
        self.out.command(instance_id, commands.Drain(abort=abort))
        return True

    async def _change(self, event: _Change) -> tuple[Any, Any]:
        """Queues a change; returns the value that `_read` gives before and after it."""
        changed: asyncio.Future[tuple[Any, Any]] = asyncio.get_running_loop().create_future()
        await self.post(event, changed)
        return await changed

    def _take(self, event: events.Event) -> None:
        start_s = self.clock()
        self.out.now_s = start_s
        self.out.traces.began_step()
        wanted = self._step(event, start_s)
        self._metrics.step_s.observe(self.clock() - start_s)
        for saw in self.watching:
            saw(event, wanted, start_s)
        if isinstance(event, _MEMBERSHIP) or _is_draining(event):
            self._tell_fleet()
        for effect in wanted:
            self.out.handlers[type(effect)](effect)
        if isinstance(event, events.TakeoverEnded):
            self._took_over()
        elif isinstance(event, events.InstanceJoined):
            self._joined(event)
        if isinstance(event, events.Submitted | events.Reopened):
            self.out.tell_if_queued(event.request.id)

    # ---- events that concern the service, too

    def _admissible(self, event: events.Event, subject: Subject) -> bool:
        """Notes the event's subject; returns False if the machine must not see the event."""
        match event, subject:
            case events.InstanceJoined(), Worker():
                return self._register(subject)
            case events.TakeoverEnded(), _:
                return self._succession.is_open  # else all peers came before the time was over
            case events.Reopened() | events.Submitted(), bytes():
                return self.out.note_spec(event, subject)
            case events.InstanceLeft(), Worker():
                return self._unregister(subject)
            case events.ProxyLeft(), _:
                self._proxies.pop(event.proxy_id, None)
            case (
                events.PolicyChanged()
                | events.WeightsChanged()
                | events.ImprovementRateChanged()
                | events.InstanceCordoned(),
                asyncio.Future(),
            ):
                self._take_change(event, subject)
                return False  # it was taken
        return True

    def _take_change(self, event: _Change, waiting: asyncio.Future[tuple[Any, Any]]) -> None:
        before = self._read(event)
        self._take(event)
        now = self._read(event)
        self._succession.changed(event)
        log.info("%s: %s -> %s", event, before, now)
        if isinstance(event, events.PolicyChanged | events.WeightsChanged) and now != before:
            self._policy_changed()
        if not waiting.cancelled():
            waiting.set_result((before, now))

    def _policy_changed(self) -> None:
        """Sends policy and weights to mixed instances, which order their work themselves."""
        policy, weights = self.machine.policy, self.machine.weights
        self._metrics.policy_changed(policy)
        for worker in self.workers.values():
            if worker.card.role == "mixed":
                self.out.command(worker.id, commands.PolicyInForce(name=policy, weights=weights))

    def _read(self, event: _Change) -> str | float | Weights | None:
        """Returns the setting that the event changes; None if the instance is gone."""
        match event:
            case events.PolicyChanged():
                return self.machine.policy
            case events.WeightsChanged():
                return self.machine.weights
            case events.ImprovementRateChanged():
                return self.machine.improvement_rate
            case events.InstanceCordoned():
                known = self.machine.cluster.current(event.instance_id, event.generation)
                return None if known is None else known.draining

    def _register(self, worker: Worker) -> bool:
        known = self.workers.get(worker.id)
        if known is not None and known.card.generation > worker.card.generation:
            worker.outbox.close(f"a later incarnation of {worker.id} is registered")
            return False
        if known is not None:
            known.outbox.close(f"{worker.id} registered again")
            self._take(known.left())
        self.workers[worker.id] = worker
        self.note_changed.set()
        worker.outbox.put(
            commands.Registered(
                heartbeat_s=self.config.heartbeat_s,
                preemption=self.config.preemption,
                policy=self.machine.policy,
                weights=self.machine.weights,
                lease=self._lease,
            )
        )
        log.info("%s %s at %s", worker.card.role, worker.id, worker.address)
        return True

    def _unregister(self, worker: Worker) -> bool:
        if self.workers.get(worker.id) is not worker:
            return False  # a later incarnation is registered
        del self.workers[worker.id]
        log.info("%s %s left", worker.card.role, worker.id)
        return True

    def _meet(self, proxy: Proxy) -> None:
        self._proxies[proxy.key] = proxy
        self.note_changed.set()
        if not self._succession.is_open:
            proxy.outbox.put(self._fleet())

    def _tell_fleet(self) -> None:
        if self._succession.is_open:
            return  # instances are still missing
        for key in self._proxies:
            self.out.update(key, self._fleet())
        self._in_force.log_changes()

    def _joined(self, event: events.InstanceJoined) -> None:
        """Goes on with an instance that is registered."""
        if self._succession.take_cordon(event.instance_id):
            self._take(
                events.InstanceCordoned(
                    instance_id=event.instance_id, generation=event.generation, cordoned=True
                )
            )
        self._came(worker_id=event.instance_id)

    # ---- taking over, and what the next leader needs for it

    def _came(self, *, worker_id: str = "", proxy_id: str = "") -> None:
        """Notes that a peer is here; the takeover ends with the last one that is awaited."""
        if self._succession.came(worker_id=worker_id, proxy_id=proxy_id):
            self.post_now(self._succession.end())

    async def end_takeover(self) -> None:
        """Ends the takeover when the time for it is over, if it has not ended before."""
        if self._succession.is_open:
            await asyncio.sleep(self.config.takeover_wait_s)
            self.post_now(self._succession.end())

    def _took_over(self) -> None:
        took_s, missing = self.clock() - self._began_s, self._succession.missing
        self._succession.ended()
        self._metrics.takeover_s.set(took_s)
        self._metrics.adopted.inc(len(self.machine.requests))
        log.info(
            "took over %d requests in %.2f s; not back: %s",
            *(len(self.machine.requests), took_s, ", ".join(missing) or "nobody"),
        )
        self._tell_fleet()
        for request_id in list(self.machine.requests):
            self.out.tell_if_queued(request_id)

    def note(self) -> bytes:
        """Returns what the next leader needs to know, also if this one is still taking over."""
        cluster = self.machine.cluster.instances.values()
        return self._succession.note(
            workers=self.workers,
            proxies=(proxy.id for proxy in self._proxies.values()),
            cordoned=(one.id for one in cluster if one.draining and not one.leaving),
            away=self.machine.cluster.absences.at(self.clock()),
        )

    def _fleet(self) -> messages.Fleet:
        return fleet(self.machine.cluster, self.workers.values(), self._lease)

    # ---- time and the end

    async def tick(self) -> None:
        """Ticks the machine and ends leases, once a heartbeat, until cancelled."""
        last_s = self.clock()
        while True:
            await asyncio.sleep(self.config.heartbeat_s)
            now_s = self.clock()
            # If the scheduler itself was delayed, the workers were not silent.
            held_up_s, last_s = max(now_s - last_s - self.config.heartbeat_s, 0.0), now_s
            for worker in self.workers.values():
                worker.seen_s = min(worker.seen_s + held_up_s, now_s)
                self._check_lease(worker, now_s - worker.seen_s)
            self._slow_log.log_changes()
            self.post_now(events.Tick())

    def _check_lease(self, worker: Worker, silent_s: float) -> None:
        if silent_s > self.config.lease_s and not worker.outbox.closed:
            log.warning("%s was silent for %.1f s: taken for dead", worker.id, silent_s)
            worker.outbox.close(f"silent for {silent_s:.1f} s")
            self.post_now(worker.left(silent=True), worker)

    def close(self) -> None:
        """Ends every stream after its queued messages."""
        for proxy in self._proxies.values():
            proxy.outbox.close()
        for worker in self.workers.values():
            worker.outbox.close()
        self.board.close()

    @property
    def addresses(self) -> dict[str, str]:
        """Returns the registered instances' addresses (host:port) by instance id."""
        return {worker.id: worker.address for worker in self.workers.values()}

    def load(self) -> FleetLoad:
        """Returns the present signals for autoscaling."""
        return self._meter.load(self.clock(), self._parked())

    def _parked(self) -> int:
        return sum(proxy.parked_requests for proxy in self._proxies.values())


def _is_draining(event: events.Event) -> bool:
    return isinstance(event, events.Reported) and isinstance(event.report, Draining)
