"""The scheduler's loop: receives an event, steps the machine, carries its effects out.

Every change of the scheduler's state passes through one queue, and so do the beginnings and ends of
streams. A command therefore reaches only the incarnation for which it was decided.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from millrace.core.autoscale.load import FleetLoad
from millrace.core.autoscale.load_meter import LoadMeter
from millrace.core.config import SchedulerConfig
from millrace.core.request import RequestState, Shard
from millrace.core.scheduler import commands, effects, events
from millrace.core.scheduler.fleet.prompt_progress import progress_of
from millrace.core.scheduler.machine import Machine
from millrace.core.scheduler.reports import Draining
from millrace.core.weights import Weights
from millrace.scheduler.board_feed import BoardFeed
from millrace.scheduler.first_tokens import FirstTokens
from millrace.scheduler.in_force import InForce
from millrace.scheduler.metrics import SchedulerMetrics
from millrace.scheduler.peers import Proxy, Worker, fleet
from millrace.scheduler.recorder import Recorder
from millrace.scheduler.recording import Recording
from millrace.scheduler.succession import Awaited, Estate
from millrace.scheduler.traces import SchedulerTraces
from millrace.state.leader import lease_name
from millrace.telemetry.metrics import Registry
from millrace.telemetry.tracing.tracer import NO_TRACER
from millrace.wire import fleet_messages as messages
from millrace.wire.codec.proxy import update_kind
from millrace.wire.codec.scheduler import command_kind

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
        self._estate = estate or Estate()
        self._awaited: Awaited | None = None  # while a takeover is open
        self._began_s = clock()
        if self._estate.is_inherited:
            self._awaited = Awaited(self._estate)
            for change in (events.TakeoverBegan(), *self._estate.changes):
                self._step(change, clock())
        self.workers: dict[str, Worker] = {}
        self._now_s = 0.0  # the time of the step whose effects are carried out
        self._proxies: dict[str, Proxy] = {}
        self._in_force = InForce(self.machine)
        self._specs: dict[str, messages.EncodedSpec] = {}
        self._recorder = recorder
        self._metrics = SchedulerMetrics(registry, self.machine, recorder, self.load, epoch)
        registry.gauge_function(
            "millrace_scheduler_parked_requests", "requests parked at the proxies", self._parked
        )
        self._first_tokens = FirstTokens(registry)
        self.board = BoardFeed(self.machine)
        self.traces = SchedulerTraces(NO_TRACER)
        self._inbox: asyncio.Queue[tuple[events.Event | None, Subject]] = asyncio.Queue()
        self._room = asyncio.Event()
        self._room.set()
        self.handlers: Mapping[type, Callable[[Any], None]] = {
            effects.Place: self._place,
            effects.Refuse: self._refuse,
            effects.Fail: self._fail,
            effects.AdmitDecode: self._admit,
            effects.RunPrefill: self._prefill,
            effects.Order: self._order,
            effects.CancelOn: self._cancel,
            effects.Record: self._record,
            effects.Stalled: self._stalled,
        }

    def trace(self, traces: SchedulerTraces) -> None:
        """Traces all requests that are submitted from now on."""
        self.traces = traces
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
        self._command(instance_id, commands.Drain(abort=abort))
        return True

    async def _change(self, event: _Change) -> tuple[Any, Any]:
        """Queues a change; returns the value that `_read` gives before and after it."""
        changed: asyncio.Future[tuple[Any, Any]] = asyncio.get_running_loop().create_future()
        await self.post(event, changed)
        return await changed

    def _take(self, event: events.Event) -> None:
        start_s = self.clock()
        self._now_s = start_s
        self.traces.began_step()
        wanted = self._step(event, start_s)
        self._metrics.step_s.observe(self.clock() - start_s)
        self._meter.saw(event, wanted, start_s)
        if self.board.outboxes:
            self.board.saw(event, wanted, start_s)
        if isinstance(event, _MEMBERSHIP) or _is_draining(event):
            self._tell_fleet()
        for effect in wanted:
            self.handlers[type(effect)](effect)
        if isinstance(event, events.TakeoverEnded):
            self._took_over()
        elif isinstance(event, events.InstanceJoined):
            self._joined(event)
        if isinstance(event, events.Submitted | events.Reopened):
            self._tell_if_queued(event.request.id)

    # ---- events that concern the service, too

    def _admissible(self, event: events.Event, subject: Subject) -> bool:
        """Notes the event's subject; returns False if the machine must not see the event."""
        match event, subject:
            case events.InstanceJoined(), Worker():
                return self._register(subject)
            case events.TakeoverEnded(), _:
                return self._awaited is not None  # else all peers came before the time was over
            case events.Reopened() | events.Submitted(), bytes():
                self._note_spec(event, subject)
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
        self._note_change(event)
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
                self._command(worker.id, commands.PolicyInForce(name=policy, weights=weights))

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

    def _note_spec(
        self, event: events.Submitted | events.Reopened, spec: messages.EncodedSpec
    ) -> None:
        """Keeps the spec of a request that is new here; that of a known one must not change."""
        request = event.request
        if request.id not in self._specs:
            self._specs[request.id] = spec
            if not isinstance(event, events.Reopened) or event.token_age_s is None:
                self._first_tokens.submitted(request)

    def _meet(self, proxy: Proxy) -> None:
        self._proxies[proxy.key] = proxy
        if self._awaited is None:
            proxy.outbox.put(self._fleet())

    def _tell_fleet(self) -> None:
        if self._awaited is not None:
            return  # instances are still missing
        for key in self._proxies:
            self._update(key, self._fleet())
        self._in_force.log_changes()

    def _joined(self, event: events.InstanceJoined) -> None:
        """Goes on with an instance that is registered."""
        if event.instance_id in self._estate.cordoned:
            self._estate.cordoned.remove(event.instance_id)
            self._take(
                events.InstanceCordoned(
                    instance_id=event.instance_id, generation=event.generation, cordoned=True
                )
            )
        self._came(worker_id=event.instance_id)

    # ---- taking over, and what the next leader needs for it

    def _came(self, *, worker_id: str = "", proxy_id: str = "") -> None:
        """Notes that a peer is here; the takeover ends with the last one that is awaited."""
        if self._awaited is not None:
            self._awaited.workers.discard(worker_id)
            self._awaited.proxies.discard(proxy_id)
            if not self._awaited.missing:
                self.post_now(events.TakeoverEnded())

    async def end_takeover(self) -> None:
        """Ends the takeover when the time for it is over, if it has not ended before."""
        if self._awaited is not None:
            await asyncio.sleep(self.config.takeover_wait_s)
            self.post_now(events.TakeoverEnded())

    def _took_over(self) -> None:
        assert self._awaited is not None  # as `_admissible` has checked
        took_s, missing = self.clock() - self._began_s, self._awaited.missing
        self._awaited = None
        self._metrics.takeover_s.set(took_s)
        self._metrics.adopted.inc(len(self.machine.requests))
        log.info(
            "took over %d requests in %.2f s; not back: %s",
            *(len(self.machine.requests), took_s, ", ".join(missing) or "nobody"),
        )
        self._tell_fleet()
        for request_id in list(self.machine.requests):
            self._tell_if_queued(request_id)

    def note(self) -> bytes:
        """Returns what the next leader needs to know, also if this one is still taking over."""
        awaited = self._awaited or Awaited(Estate())
        cluster = self.machine.cluster.instances.values()
        cordoned = {one.id for one in cluster if one.draining and not one.leaving}
        return Estate(
            workers=sorted(awaited.workers.union(self.workers)),
            proxies=sorted(awaited.proxies.union(proxy.id for proxy in self._proxies.values())),
            cordoned=sorted(cordoned.union(self._estate.cordoned)),
            changes=self._estate.changes,
            configured=self._estate.configured,
        ).encode()

    def _note_change(self, event: events.Event) -> None:
        """Leaves a changed setting to the next leader; cordons are noted with their instances."""
        if not isinstance(event, events.InstanceCordoned):
            others = [one for one in self._estate.changes if type(one) is not type(event)]
            self._estate.changes = [*others, event]

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
            held_up_s = max(now_s - last_s - self.config.heartbeat_s, 0.0)
            last_s = now_s
            for worker in self.workers.values():
                worker.seen_s = min(worker.seen_s + held_up_s, now_s)
                self._check_lease(worker, now_s - worker.seen_s)
            self.post_now(events.Tick())

    def _check_lease(self, worker: Worker, silent_s: float) -> None:
        if silent_s > self.config.lease_s and not worker.outbox.closed:
            log.warning("%s was silent for %.1f s: taken for dead", worker.id, silent_s)
            worker.outbox.close(f"silent for {silent_s:.1f} s")
            self.post_now(worker.left(), worker)

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

    # ---- effects

    def _place(self, effect: effects.Place) -> None:
        placed = messages.Placed(
            request_id=effect.request_id,
            decode=self.workers[effect.decode_id].member,
            predicted_ttft_s=effect.predicted_ttft_s,
        )
        self._first_tokens.placed(effect, self._now_s)
        self._update(effect.proxy_id, placed)

    def _refuse(self, effect: effects.Refuse) -> None:
        self._specs.pop(effect.request_id, None)
        self._first_tokens.refused(effect.request_id)
        self.traces.ended(effect.request_id, effect.message)
        self._metrics.refused(effect)
        self._update(effect.proxy_id, effect)

    def _fail(self, effect: effects.Fail) -> None:
        about = self.traces.about(effect.request_id)
        log.warning("request %s failed: %s", effect.request_id, effect.message, extra=about)
        self.traces.ended(effect.request_id, effect.message)
        self._update(effect.proxy_id, effect)

    def _admit(self, effect: effects.AdmitDecode) -> None:
        command = messages.SendAdmitDecode(
            request=self._specs[effect.request_id],
            attempt=effect.attempt,
            kept_tokens=effect.kept_tokens,
            shards=self._shards(effect.shards),
            expected_tokens=effect.expected_tokens,
        )
        self._command(effect.instance_id, command)

    def keep_traces(self, wanted: commands.KeepTraces) -> None:
        """Exports the held spans of these traces, here and at all instances."""
        self.traces.keep(wanted.trace_ids)
        for instance_id in self.workers:
            self._command(instance_id, wanted)

    def _prefill(self, effect: effects.RunPrefill) -> None:
        self.traces.sent(effect)
        command = messages.SendRunPrefill(
            request=self._specs[effect.request_id],
            chunks=effect.chunks,
            decode=self.workers[effect.decode_id].member if effect.decode_id else None,
            attempt=effect.attempt,
            group=self._members(effect.chunks[-1].instance_ids),
            shards=self._shards(effect.shards),
        )
        self._command(effect.instance_id, command)

    def _shards(self, shards: Iterable[Shard]) -> tuple[commands.KvShard, ...]:
        return tuple(
            commands.KvShard(
                worker=self.workers[shard.worker_id].member,
                start_token=shard.start_token,
                end_token=shard.end_token,
            )
            for shard in shards
        )

    def _members(self, instance_ids: Iterable[str]) -> tuple[commands.Member, ...]:
        return tuple(self.workers[instance_id].member for instance_id in instance_ids)

    def _order(self, effect: effects.Order) -> None:
        self._command(effect.instance_id, effect)

    def _cancel(self, effect: effects.CancelOn) -> None:
        self._command(effect.instance_id, effect)

    def _stalled(self, effect: effects.Stalled) -> None:
        waits = "; ".join(f"{instance_id}: {what}" for instance_id, what in effect.waits)
        log.error(
            "prefill stood still: requests %s are planned again. Please report this defect. %s",
            ", ".join(effect.request_ids),
            waits,
        )

    def _record(self, effect: effects.Record) -> None:
        self._recorder.put(effect)
        if effect.state is RequestState.QUEUED:
            self._tell_if_queued(effect.request_id)
        self._first_tokens.recorded(effect, self._now_s)
        self.traces.recorded(effect)
        if effect.state.is_final:
            del self._specs[effect.request_id]
            self._metrics.ended(effect)

    def _tell_if_queued(self, request_id: str) -> None:
        """Tells the proxy that no instance has room for a request yet."""
        request = self.machine.requests.get(request_id)
        if request is None or request.state is not RequestState.QUEUED:
            return
        if request.decode_id is None:
            self._update(request.proxy_id, messages.Queued(request_id=request_id))

    def send_progress(self, proxy: Proxy, request_ids: Iterable[str]) -> None:
        """Sends the progress of prompts, also of other proxies; leaves out ended requests."""
        machine = self.machine
        for request_id in request_ids:
            request = machine.requests.get(request_id)
            if request is not None:
                expected_s, place = self._first_tokens.expected_s(request_id), None
                if request.state is not RequestState.TRANSFERRING:
                    place = machine.queue_place(request)
                if found := progress_of(request, self.clock(), expected_s, place):
                    self._update(proxy.key, messages.Progress(request_id=request_id, prompt=found))

    def _update(self, key: str, update: messages.ProxyUpdate) -> None:
        if (proxy := self._proxies.get(key)) is not None:
            proxy.outbox.put(update)
            self._metrics.sent.labels(update_kind(update)).inc()

    def _command(self, instance_id: str, command: messages.WorkerCommand) -> None:
        self.workers[instance_id].outbox.put(command)
        self._metrics.sent.labels(command_kind(command)).inc()


def _is_draining(event: events.Event) -> bool:
    return isinstance(event, events.Reported) and isinstance(event.report, Draining)
