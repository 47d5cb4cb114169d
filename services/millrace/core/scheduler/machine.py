"""Decides everything: `step(event, now_s) -> effects`. No clock, no randomness, no I/O.

The way of a request (`docs/concepts/scheduler.md` has every step):

1. A submitted request waits until a decode instance has enough free pages for the prompt and the
   whole answer (Tetris section 5.2 picks the instance), or until several instances together have
   them (`fleet.kvp_placement`). Then it is placed.
2. A placed request waits in the pool's waiting queue. Every round plans it again, until the group
   of its first chunk has task slots and all its instances have the prompt's pages. Then it is sent.
3. The chunks of a sent request are tasks in the pool's run queue (`fleet.run_queue`), which picks
   the tasks that run.

A prefill-only request, which generates no token, needs no decode instance and skips step 1. The
leader of its group emits its result, and the leader's RequestReleased ends the request. If one of
its instances is lost before, the request is prefilled again from its beginning: its KV is nowhere
else.

The pages and slots that a request occupies at an instance are a `Holding` of this instance
(`fleet.instances`). A holding outlives the request:

- The task slot of a prefill instance is freed by the chunk's ChunkFinished, or when the request
  ends or is planned again.
- The pages of a prefill instance are freed by RequestReleased. A member of a group that is not the
  leader may send it while other members compute, if its part is `complete`.
- The pages of a decode instance are freed by RequestFinished (of any reason) or RequestReleased;
  the pages of a KVP worker's shard by the worker's RequestReleased.
- All of them are freed by the instance's death, or `release_timeout_s` after the request let go.

So a worker that reports RequestFailed also reports RequestReleased once the pages are free. A
request is never sent to a prefill instance that still holds an earlier attempt of the request. So
an event of a prefill instance is always about the attempt that this instance holds.

When a prefill instance is lost, the request keeps its decode instance and the KV of the first
tokens, which landed there. The next attempt computes the rest. Reports of decode name their
attempt, since a report may be on its way when the next attempt begins.

Events of unknown requests, of earlier incarnations of an instance and of earlier attempts, and
events that come twice or too late, change nothing and are counted in `ignored`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from millrace.core.config import SchedulerConfig
from millrace.core.incarnation import Incarnation
from millrace.core.live_request import LiveRequest
from millrace.core.request import Request, RequestState
from millrace.core.scheduler import events, integrity, reports
from millrace.core.scheduler.dispatch.chunk_progress import ChunkProgress
from millrace.core.scheduler.dispatch.dispatcher import Dispatcher, Planned
from millrace.core.scheduler.dispatch.event_filter import EventFilter
from millrace.core.scheduler.dispatch.request_progress import RequestProgress
from millrace.core.scheduler.dispatch.stall_watch import StallWatch
from millrace.core.scheduler.dispatch.suspects import Suspects
from millrace.core.scheduler.dispatch.takeover import Takeover
from millrace.core.scheduler.effects import Effect
from millrace.core.scheduler.explanation.explain import Explanation, explain, queue_place
from millrace.core.scheduler.fleet.absences import FORGOTTEN
from millrace.core.scheduler.fleet.cluster import Cluster
from millrace.core.scheduler.fleet.instances import (
    DecodeInstance,
    Instance,
    KvpInstance,
    PrefillInstance,
)
from millrace.core.scheduler.fleet.pool import Pool
from millrace.core.scheduler.outcomes.admission import Backlog, refusal, refused_for_now
from millrace.core.scheduler.outcomes.objectives import allowed_s, mean_step_s
from millrace.core.scheduler.request_table import RequestTable, still_needs
from millrace.core.scheduler.step_context import StepContext
from millrace.core.weights import Weights


class Machine:
    """The scheduler's core. Drivers feed it events in order and carry its effects out in order."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.cluster = Cluster(config)
        self._table = RequestTable(config, self.cluster)
        self._dispatcher = Dispatcher(self._table)
        self._event_filter = EventFilter(self.cluster)
        self._stall_watch = StallWatch(self._table)
        self._takeover = Takeover(self._table, self._take_in)
        self.suspects = Suspects(self._table)
        self.breakers = self._table.breakers
        self.slow_instances = self._table.slow_instances
        chunk_progress = ChunkProgress(self._table, self._dispatcher, self._event_filter)
        request_progress = RequestProgress(self._table, self._dispatcher, self._event_filter)
        self._handlers: dict[type, Callable[[StepContext, Any], None]] = {
            events.InstanceJoined: self._joined,
            events.InstanceLeft: self._left,
            events.InstanceCordoned: self._cordoned,
            events.Reported: self._reported,
            events.Submitted: self._submitted,
            events.Reopened: self._reopened,
            events.TakeoverBegan: self._takeover_began,
            events.TakeoverEnded: self._takeover_ended,
            events.InstancesForgotten: self._instances_forgotten,
            events.CancelRequested: self._cancel,
            events.ProxyLeft: self._proxy_left,
            events.PolicyChanged: self._policy_changed,
            events.WeightsChanged: self._weights_changed,
            events.ImprovementRateChanged: self._rate_changed,
            events.Tick: self._tick,
        }
        self._report_handlers: dict[type, Callable[[StepContext, Instance, Any], None]] = {
            reports.Heartbeat: self._heartbeat,
            reports.CachedBlocks: self._cached,
            reports.Draining: self._draining,
            reports.ChunkStarted: chunk_progress.started,
            reports.ChunkFinished: chunk_progress.finished,
            reports.ChunkSuspended: chunk_progress.suspended,
            reports.RequestReleased: request_progress.released,
            reports.PrefixLanded: request_progress.prefix_landed,
            reports.PromptAdvanced: request_progress.prompt_advanced,
            reports.FirstTokenSent: request_progress.first_token_sent,
            reports.DecodeStarted: request_progress.decode_started,
            reports.RequestFinished: request_progress.finished,
            reports.RequestFailed: request_progress.failed,
        }

    def step(self, event: events.Event, now_s: float) -> list[Effect]:
        """Takes one event in and returns the effects. `now_s` never runs backwards."""
        step = StepContext(now_s)
        self._handlers[type(event)](step, event)
        return step.effects

    def observe_plans(self, on_planned: Callable[[Planned], None]) -> None:
        """Shows every plan to `on_planned` when its request is sent to prefill instances."""
        self._dispatcher.on_planned = on_planned

    @property
    def requests(self) -> Mapping[str, LiveRequest]:
        """Returns the requests that have not ended, by id, oldest first."""
        return self._table.requests

    @property
    def ignored(self) -> int:
        """Returns the events that changed nothing."""
        return self._event_filter.ignored

    @property
    def policy(self) -> str:
        """Returns the priority policy in force: `config.policy`, or its replacement."""
        return self.cluster.policy.name

    @property
    def weights(self) -> Weights:
        """Returns the weights in force, of all names that were given one."""
        return self.cluster.weights

    @property
    def improvement_rate(self) -> float:
        """Returns the share by which a larger group must cut the TTFT now."""
        return self.cluster.improvement_rate

    @property
    def queued(self) -> int:
        """Returns the requests that no prefill instance has yet."""
        return len(self._table.waiting_queue_of)

    @property
    def queued_s(self) -> float:
        """Returns the predicted seconds of prefill of the queued requests."""
        pools = self.cluster.pools.values()
        return self._table.unplaced.work_s + sum(pool.waiting.work_s for pool in pools)

    @property
    def rounds(self) -> int:
        """Returns the scheduling rounds so far."""
        return self._dispatcher.count

    @property
    def commands(self) -> int:
        """Returns the commands to prefill instances so far."""
        return self._dispatcher.commands

    @property
    def preemptions(self) -> int:
        """Returns the running tasks that had to yield, in the present pools."""
        return sum(pool.run_queue.preemptions for pool in self.cluster.pools.values())

    @property
    def release_timeouts(self) -> int:
        """Returns the holdings freed without a report of their instance: a worker's defect."""
        return self._table.release_timeouts

    @property
    def stalled(self) -> int:
        """The requests taken back from instances that stood still with prepared work: a defect."""
        return self._stall_watch.stalled

    def prefill_work_s(self, request: Request) -> float:
        """Returns the predicted seconds of one instance for the request; 0 where no pool is ready.

        Also for a refused request, which is load, too.
        """
        live = LiveRequest(request)
        if ready := self.cluster.ready_pools():
            ready[0].predict(live)
        return live.predicted_work_s

    def explain(self, request_id: str, now_s: float) -> Explanation | None:
        """Says why a request waits, or waited if it ended lately. None if it is not known."""
        return explain(self._table, request_id, now_s)

    def queue_place(self, request: LiveRequest) -> int | None:
        """Returns the request's place in its queue, from 1; None if it waits in none."""
        return queue_place(self._table, request)

    def holder(self, request_id: str) -> str | None:
        """Returns the proxy that has the open request of this id; None if there is none."""
        request = self.requests.get(request_id)
        return self._takeover.holder(request_id) if request is None else request.proxy_id

    def check_integrity(self) -> None:
        """Counts everything again from the requests. Raises IntegrityError on a difference."""
        integrity.check(self._table)

    # ---- instances

    def _joined(self, step: StepContext, event: events.InstanceJoined) -> None:
        known = self.cluster.instances.get(event.instance_id)
        if known is not None and known.card.generation >= event.generation:
            self._event_filter.ignored += 1
            return
        if known is not None:
            self._leave(step, known)
        self.suspects.registered(step, event)
        self.cluster.add(event)
        self._takeover.joined(step, event)
        self._dispatcher.run(step)

    def _left(self, step: StepContext, event: events.InstanceLeft) -> None:
        if (instance := self._event_filter.current(event)) is not None:
            self._leave(step, instance)
            if event.silent:
                lost = Incarnation(event.instance_id, event.generation)
                self.suspects.died(step, lost, silent=True)
            self._dispatcher.run(step)

    def _leave(self, step: StepContext, instance: Instance) -> None:
        """Removes an instance. The attempts that end with it do not count: its loss does."""
        pool = self.cluster.pool_of(instance)
        self.suspects.left(step, instance)
        self._takeover.left(instance)
        self.cluster.lose(instance, step.now_s)
        self.breakers.left(instance.id)
        self.slow_instances.left(instance.id)
        for request_id in instance.holdings:
            request = self._table.served(request_id, instance)
            if request is not None and still_needs(request, instance):
                self.suspects.forgive(request)
                why = f"{instance.card.role} {instance.id} died"
                self._table.lost(step, request, instance, why)
            elif request is not None:
                self._table.drop_tasks(request)  # it decodes before prefill's report came
        if isinstance(instance, PrefillInstance):
            pool.run_queue.forget(instance)
        self._unplace_unserved(step, pool)
        self.cluster.drop_if_empty(instance.card.model_hash)

    def _reported(self, step: StepContext, event: events.Reported) -> None:
        if (instance := self._event_filter.current(event)) is None:
            return
        report = event.report
        if self._takeover.is_open and not isinstance(report, reports.InstanceReport):
            self._takeover.reported(instance, report)
        else:
            self._report_handlers[type(report)](step, instance, report)

    def _draining(self, step: StepContext, instance: Instance, report: reports.Draining) -> None:
        del report  # it carries nothing
        if not instance.leaving:
            self.cluster.drain(instance)
            self._make_way(step, instance)

    def _cordoned(self, step: StepContext, event: events.InstanceCordoned) -> None:
        if (instance := self._event_filter.current(event)) is not None:
            self.cluster.cordon(instance, cordoned=event.cordoned)
            self._make_way(step, instance)

    def _make_way(self, step: StepContext, instance: Instance) -> None:
        """Places requests again that wait for prefill at an instance that takes no new work.

        A request stays where no other instance has room for it now.
        """
        self._unplace_unserved(step, self.cluster.pool_of(instance))
        if instance.draining:
            self._dispatcher.place_elsewhere(step, instance)
        self._dispatcher.run(step)

    def _unplace_unserved(self, step: StepContext, pool: Pool) -> None:
        """Takes requests back from decode instances whose model no prefill instance serves.

        A request stays where decode keeps the KV of an earlier attempt.
        """
        if not (pool.is_ready and pool.prefill):
            for request in list(pool.waiting):
                if not request.continues:
                    self._table.retry(step, request, "no prefill instance serves this model now")

    def _heartbeat(self, step: StepContext, instance: Instance, report: reports.Heartbeat) -> None:
        instance.heard(report)
        if isinstance(instance, PrefillInstance):
            self._stall_watch.heard(instance, report, step.now_s)
        if isinstance(instance, DecodeInstance) and instance.reported_free_pages is not None:
            self._dispatcher.room_made(step, instance)  # more pages may be free than were counted

    def _cached(self, step: StepContext, instance: Instance, report: reports.CachedBlocks) -> None:
        if isinstance(instance, KvpInstance):
            return  # it has no prefix cache
        instance.prefixes.heard(report)
        if report.added and isinstance(instance, PrefillInstance):
            self._dispatcher.run(step)  # a request may use this prefix

    # ---- events of proxies

    def _submitted(self, step: StepContext, event: events.Submitted) -> None:
        if event.request.id in self.requests:
            self._event_filter.ignored += 1
            return
        if self._takeover.is_open:
            self._takeover.submitted(event)
            return
        self._new(step, event.request)

    def _new(self, step: StepContext, spec: Request, earlier_attempts: int = 0) -> None:
        """Takes a request that is not known, or refuses it. `earlier_attempts`: of `Reopened`."""
        request = LiveRequest(spec)
        request.count_attempts(earlier_attempts)
        self._predict(request)
        backlog = Backlog(self.queued, self.queued_s, decode_is_full=bool(self._table.unplaced))
        refused = refusal(request, self.cluster, backlog, step.now_s, self.config)
        if refused is not None:
            refused = refused_for_now(refused, request, self.cluster, step.now_s, self.config)
            step.refuse(request, refused)
            return
        self._accept(step, request)
        self.suspects.submitted(step, request)
        self._dispatcher.run(step)

    def _predict(self, request: LiveRequest) -> None:
        """Predicts the request's prefill and answer, and sets the deadline of its first token."""
        if ready := self.cluster.ready_pools():
            ready[0].predict(request)
        request.expect(self.cluster.answer_lengths.expected(request))
        step_s = 0.0
        if request.slo.e2e_s is not None:
            step_s = mean_step_s(request, (one for pool in ready for one in pool.kv_owners()))
        request.due_by(request.arrival_s + allowed_s(request, step_s))

    def _accept(self, step: StepContext, request: LiveRequest) -> None:
        """Adds a request to the table, unplaced."""
        self.cluster.arrived(request, step.now_s)
        self._table.add(step, request)

    def _take_in(self, step: StepContext, request: LiveRequest) -> None:
        """Adds a request that another scheduler has accepted."""
        self._predict(request)
        self._accept(step, request)
        self.suspects.adopted(step, request)

    def _reopened(self, step: StepContext, event: events.Reopened) -> None:
        if self._takeover.is_open:
            self._takeover.reopened(event)
        elif not self._takeover.late(step, event):
            self._new(step, event.request, event.attempts)

    def _takeover_began(self, step: StepContext, event: events.TakeoverBegan) -> None:
        del step, event  # nothing is decided before the end
        self._takeover.begin()

    def _takeover_ended(self, step: StepContext, event: events.TakeoverEnded) -> None:
        for instance_id in set(event.missing).difference(self.cluster.instances):
            self.cluster.absences.missing(instance_id, step.now_s)
        for waiting in self._takeover.end(step):
            self._submitted(step, waiting)
        self._dispatcher.run(step)

    def _instances_forgotten(self, step: StepContext, event: events.InstancesForgotten) -> None:
        del event
        self.cluster.absences.missing(FORGOTTEN, step.now_s)

    def _cancel(self, step: StepContext, event: events.CancelRequested) -> None:
        request = self.requests.get(event.request_id)
        self._takeover.cancelled(event.request_id, event.proxy_id)
        if request is None or request.proxy_id != event.proxy_id:
            self._event_filter.ignored += 1
            return
        # Its proxy has the whole answer: it met a stop string, or has the tokens of an attempt.
        complete = event.reason == "stop" and request.state is not RequestState.QUEUED
        if complete:
            self._table.finish(step, request, None, event.reason)
        else:
            self._table.end(step, request, RequestState.CANCELLED, event.reason)
        self._dispatcher.run(step)

    def _proxy_left(self, step: StepContext, event: events.ProxyLeft) -> None:
        self._takeover.proxy_left(event.proxy_id)
        for request_id in list(self._table.by_proxy.get(event.proxy_id, ())):
            request = self.requests[request_id]
            self._table.end(step, request, RequestState.CANCELLED, "its proxy left")
        self._dispatcher.run(step)

    # ---- settings and time

    def _policy_changed(self, step: StepContext, event: events.PolicyChanged) -> None:
        self._table.change_policy(event.policy, step.now_s)
        self._dispatcher.run(step)

    def _weights_changed(self, step: StepContext, event: events.WeightsChanged) -> None:
        self.cluster.weigh(event.weights)
        self._dispatcher.run(step)

    def _rate_changed(self, step: StepContext, event: events.ImprovementRateChanged) -> None:
        self.cluster.change_rate(event, step.now_s)
        self._dispatcher.run(step)

    def _tick(self, step: StepContext, event: events.Tick) -> None:
        del event  # it carries nothing
        self._table.expire(step)
        self.suspects.check(step)
        self.breakers.check(step.now_s)
        self.slow_instances.check(step.now_s)
        self._stall_watch.check(step)
        self._dispatcher.run(step)
