"""Decides everything: `step(event, now_s) -> effects`. No clock, no randomness, no I/O.

A request's way. Submitted, it waits until a decode instance has the pages of its whole life free
(Tetris section 5.2 picks which); placed, it waits in its pool's line, planned anew in every round,
until the group of its first chunk has task slots and all its instances the prompt's pages; then it
is sent, and its chunks stand on the pool's `board`, which says who runs. What it occupies stands in
holdings at the instances (`cluster`), which outlive it:

- a prefill's task slot is freed by the chunk's ChunkFinished, or when the request ends or is sent
  elsewhere;
- a prefill's pages are freed by RequestReleased;
- a decode's pages are freed by RequestFinished (of any reason) or RequestReleased;
- all of it by the instance's death, or `release_timeout_s` after the request let go of it.

So a worker that reports RequestFailed reports RequestReleased too, once the pages are free. A
request is never sent to an instance that still holds an earlier attempt of it: an event speaks of
the one attempt that its instance holds. Events of unknown requests, of earlier lives of an
instance, duplicates and late ones change nothing and are counted in `ignored`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from millrace.core import events, integrity
from millrace.core.admission import refusal
from millrace.core.board import Task
from millrace.core.cluster import Cluster, DecodeInstance, Instance, Pool, PrefillInstance
from millrace.core.config import SchedulerConfig
from millrace.core.effects import Effect, Refuse
from millrace.core.lifecycle import Lifecycle, still_needs
from millrace.core.request import TRANSITIONS, Request, RequestState
from millrace.core.rounds import Rounds

_OfHolder = events.RequestReleased | events.RequestFinished | events.RequestFailed
_OfInstance = (
    _OfHolder
    | events.InstanceLeft
    | events.InstanceDraining
    | events.LoadReported
    | events.ChunkStarted
    | events.ChunkFinished
    | events.ChunkSuspended
    | events.DecodeStarted
)

#: Deadline of token one where a request has no objective: after this many times its prefill alone,
#: and this many seconds at least (the constants that Medha's authors released).
DEADLINE_FACTOR = 1.5
LEAST_DEADLINE_S = 0.5

_OfChunk = events.ChunkStarted | events.ChunkSuspended | events.ChunkFinished


class Machine:
    """The scheduler's core. Drivers feed it events in order and carry its effects out in order."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.cluster = Cluster(config)
        self.ignored = 0  # events that changed nothing
        self._life = Lifecycle(config, self.cluster)
        self._rounds = Rounds(self._life)
        self._handlers: dict[type, Callable[[Any], None]] = {
            events.InstanceJoined: self._joined,
            events.InstanceLeft: self._left,
            events.InstanceDraining: self._draining,
            events.LoadReported: self._load,
            events.Submitted: self._submitted,
            events.CancelRequested: self._cancel,
            events.ProxyLeft: self._proxy_left,
            events.ChunkStarted: self._chunk_started,
            events.ChunkFinished: self._chunk_finished,
            events.ChunkSuspended: self._chunk_suspended,
            events.RequestReleased: self._released,
            events.DecodeStarted: self._decode_started,
            events.RequestFinished: self._finished,
            events.RequestFailed: self._failed,
            events.PolicyChanged: self._policy_changed,
            events.Tick: self._tick,
        }

    def step(self, event: events.Event, now_s: float) -> list[Effect]:
        """Takes one event in and returns what is to be done. `now_s` never runs backwards."""
        effects: list[Effect] = []
        self._life.now_s = now_s
        self._life.effects = effects
        self._handlers[type(event)](event)
        return effects

    @property
    def requests(self) -> Mapping[str, Request]:
        """Requests that have not ended, by id, oldest first."""
        return self._life.requests

    @property
    def policy(self) -> str:
        """The priority policy in force: `config.policy`, or what it was changed to."""
        return self._life.policy.name

    @property
    def queued(self) -> int:
        """Requests that no prefill instance has yet."""
        return len(self._life.line_of)

    @property
    def queued_s(self) -> float:
        """Predicted seconds of prefill of the queued requests."""
        pools = self.cluster.pools.values()
        return self._life.unplaced.work_s + sum(pool.line.work_s for pool in pools)

    @property
    def rounds(self) -> int:
        """Scheduling rounds so far."""
        return self._rounds.count

    @property
    def commands(self) -> int:
        """Commands to prefill instances so far."""
        return self._rounds.commands

    @property
    def preemptions(self) -> int:
        """Tasks told to yield while they ran, in the pools there are now."""
        return sum(pool.board.preemptions for pool in self.cluster.pools.values())

    @property
    def release_timeouts(self) -> int:
        """Holdings that were freed without their instance's word: a worker's defect."""
        return self._life.release_timeouts

    def check_integrity(self) -> None:
        """Counts everything anew from the requests. Raises IntegrityError on a difference."""
        integrity.check(self._life)

    # ---- instances

    def _joined(self, event: events.InstanceJoined) -> None:
        known = self.cluster.instances.get(event.instance_id)
        if known is not None and known.card.generation >= event.generation:
            self.ignored += 1
            return
        if known is not None:
            self._leave(known)
        self.cluster.add(event)
        self._rounds.run()

    def _left(self, event: events.InstanceLeft) -> None:
        if (instance := self._speaker(event)) is not None:
            self._leave(instance)
            self._rounds.run()

    def _leave(self, instance: Instance) -> None:
        pool = self.cluster.pool_of(instance)
        self.cluster.remove(instance)
        for request_id in instance.holdings:
            request = self._life.served(request_id, instance)
            if request is not None and still_needs(request, instance):
                self._life.lost(request, instance, f"{instance.card.role} {instance.id} died")
            elif request is not None:
                self._life.drop_tasks(request)  # it decodes before prefill said that it was done
        if isinstance(instance, PrefillInstance):
            pool.board.forget(instance)
        self._unplace_unserved(pool)
        self.cluster.drop_if_empty(instance.card.model_hash)

    def _draining(self, event: events.InstanceDraining) -> None:
        instance = self._speaker(event)
        if instance is not None and not instance.draining:
            self.cluster.drain(instance)
            self._unplace_unserved(self.cluster.pool_of(instance))
            self._rounds.run()

    def _unplace_unserved(self, pool: Pool) -> None:
        """Without a prefill instance for its model a decode instance is no place to wait at."""
        if not (pool.is_ready and pool.prefill):
            for request in list(pool.line):
                self._life.retry(request, "no prefill instance serves this model now")

    def _load(self, event: events.LoadReported) -> None:
        if (instance := self._speaker(event)) is not None:
            instance.running = event.running
            instance.waiting = event.waiting

    # ---- what proxies say

    def _submitted(self, event: events.Submitted) -> None:
        request = event.request
        if request.id in self.requests:
            self.ignored += 1
            return
        refused = refusal(request, self.cluster, self.queued, self.queued_s, self.config)
        if refused is not None:
            self._life.effects.append(
                Refuse(
                    request_id=request.id,
                    proxy_id=request.proxy_id,
                    code=refused.code,
                    message=refused.message,
                    retry_after_s=refused.retry_after_s,
                )
            )
            return
        self.cluster.arrived(self._life.now_s)
        self.cluster.ready_pools()[0].predict(request)
        request.deadline_s = request.arrival_s + (
            request.slo.ttft_s
            or max(DEADLINE_FACTOR * request.predicted_prefill_s, LEAST_DEADLINE_S)
        )
        self._life.add(request)
        self._rounds.run()

    def _cancel(self, event: events.CancelRequested) -> None:
        request = self.requests.get(event.request_id)
        if request is None:
            self.ignored += 1
            return
        # A proxy that met a stop string has the whole answer.
        complete = event.reason == "stop" and request.state is not RequestState.QUEUED
        end = RequestState.FINISHED if complete else RequestState.CANCELLED
        self._life.end(request, end, event.reason)
        self._rounds.run()

    def _proxy_left(self, event: events.ProxyLeft) -> None:
        for request_id in list(self._life.by_proxy.get(event.proxy_id, ())):
            self._life.end(self.requests[request_id], RequestState.CANCELLED, "its proxy left")
        self._rounds.run()

    # ---- what workers say

    def _chunk_started(self, event: events.ChunkStarted) -> None:
        found = self._computing(event)
        if found is not None:
            task, request = found
            if task.started_s is None:
                task.started_s = self._life.now_s
            if request.running_since_s is None:
                request.running_since_s = self._life.now_s

    def _chunk_suspended(self, event: events.ChunkSuspended) -> None:
        found = self._computing(event)
        if found is not None:
            task, request = found
            task.executed_s = event.compute_s
            task.started_s = request.running_since_s = None
            request.executed_s = self._executed_s(request) + event.compute_s

    def _chunk_finished(self, event: events.ChunkFinished) -> None:
        found = self._computing(event)
        if found is None:
            return
        task, request = found
        board = self._life.board_of[request.id]
        done = board.finish(task, request)
        request.chunks_done = event.chunk_index + 1
        request.executed_s = self._executed_s(request)
        request.running_since_s = None
        if request.chunks_done == len(request.chunks):
            self._life.board_of.pop(request.id)
            self._computed(request)
        if done:
            self._learn(task, event.compute_s)
            self._rounds.dispatch()

    def _learn(self, task: Task, compute_s: float) -> None:
        """Corrects what is predicted of the leader. Batches are predicted on the safe side."""
        if not task.batched:
            self.cluster.corrections.observe(
                task.members[0].id, predicted_s=task.modelled_s, observed_s=compute_s
            )

    def _computing(self, event: _OfChunk) -> tuple[Task, Request] | None:
        """The task the event speaks of, if its leader speaks and the request still needs it."""
        instance = self._speaker(event)
        if instance is None:
            return None
        if isinstance(instance, DecodeInstance) and instance.card.role == "mixed":
            self._mixed_said(event, instance)
            return None
        board = self._life.board_of.get(event.request_id)
        if board is not None:
            task = board.find(event.request_id, event.chunk_index)
            if task is not None and task.members[0] is instance and task.ready:
                return task, self.requests[event.request_id]
        self.ignored += 1
        return None

    def _mixed_said(self, event: _OfChunk, instance: DecodeInstance) -> None:
        """A mixed instance orders its own work: only the end of a prefill matters here."""
        request = self._life.served(event.request_id, instance)
        if isinstance(event, events.ChunkFinished) and request is not None:
            self._computed(request)
        else:
            self.ignored += request is None

    def _executed_s(self, request: Request) -> float:
        """Predicted seconds of the request's finished chunks."""
        left = self._life.board_of[request.id].tasks.get(request.id, ())
        return request.predicted_prefill_s - sum(task.predicted_s for task in left)

    def _computed(self, request: Request) -> None:
        """All of the prompt is computed: token one is known."""
        if request.state is RequestState.PREFILLING:
            self._life.advance(request, RequestState.TRANSFERRING)

    def _released(self, event: events.RequestReleased) -> None:
        instance = self._holder(event)
        if instance is None:
            return
        request = self._life.served(event.request_id, instance)
        instance.release(event.request_id)
        # A prefill instance that let go of a computed request has sent all of its cache.
        computed = request is not None and request.state is not RequestState.PREFILLING
        if request is not None and not (computed and isinstance(instance, PrefillInstance)):
            self._life.lost(request, instance, f"{instance.card.role} {instance.id} gave up")
            self._rounds.run()
        elif request is not None and self._life.drop_tasks(request):
            self._rounds.run()  # decode had its cache before prefill said that it was done
        else:
            self._rounds.room_made(instance)

    def _decode_started(self, event: events.DecodeStarted) -> None:
        instance = self._speaker(event)
        request = None
        if isinstance(instance, DecodeInstance):
            request = self._life.served(event.request_id, instance)
        if request is None or RequestState.DECODING not in TRANSITIONS[request.state]:
            self.ignored += instance is not None
            return
        assert isinstance(instance, DecodeInstance)  # or it would serve no request here
        instance.start(request.id)
        self._life.advance(request, RequestState.DECODING)

    def _finished(self, event: events.RequestFinished) -> None:
        instance = self._holder(event)
        if not isinstance(instance, DecodeInstance):
            self.ignored += instance is not None
            return
        request = self._life.served(event.request_id, instance)
        instance.release(event.request_id)
        computing = event.request_id in self._life.board_of  # prefill's news may be late
        if request is not None:
            if event.reason != "cancelled" and request.state is not RequestState.QUEUED:
                self._life.end(request, RequestState.FINISHED, None)
            else:
                self._life.lost(request, instance, f"decode {instance.id} gave up")
                computing = True
        if request is not None and computing:
            self._rounds.run()
        else:
            self._rounds.room_made(instance)

    def _failed(self, event: events.RequestFailed) -> None:
        instance = self._holder(event)
        if instance is None:
            return
        request = self._life.served(event.request_id, instance)
        if request is not None and still_needs(request, instance):
            why = f"{instance.card.role} {instance.id}: {event.message}"
            if event.retryable:
                self._life.lost(request, instance, why)
            else:
                self._life.fail(request, why, instance)
        elif request is not None:
            self._life.drop_tasks(request)
        self._rounds.run()

    def _policy_changed(self, event: events.PolicyChanged) -> None:
        self._life.change_policy(event.policy)
        self._rounds.run()

    def _tick(self, event: events.Tick) -> None:
        del event  # the time is all it says
        self._life.expire()
        self._rounds.run()

    # ---- who speaks

    def _speaker(self, event: _OfInstance) -> Instance | None:
        """The instance, unless the scheduler knows no such life of it."""
        instance = self.cluster.current(event.instance_id, event.generation)
        self.ignored += instance is None
        return instance

    def _holder(self, event: _OfHolder) -> Instance | None:
        """The instance, if it holds the request."""
        instance = self._speaker(event)
        if instance is None or event.request_id in instance.holdings:
            return instance
        self.ignored += 1
        return None
