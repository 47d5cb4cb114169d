"""Watches the scheduler's machine and says in the board's events what happened.

A driver calls `saw` after each step, with the step's event and effects. The observer reads the
machine and changes nothing in it. An observer may begin at any time: `present` describes the fleet
and the requests of that moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from millrace.core.board import events as board
from millrace.core.live_request import LiveRequest
from millrace.core.request import RequestState
from millrace.core.scheduler import effects as fx
from millrace.core.scheduler import events, reports
from millrace.core.scheduler.fleet.instances import DecodeInstance, Instance, PrefillInstance
from millrace.core.scheduler.machine import Machine

#: States in which no chunk of a request computes.
_COMPUTES_NOTHING = frozenset(
    {
        RequestState.QUEUED,
        RequestState.FINISHED,
        RequestState.FAILED,
        RequestState.CANCELLED,
    }
)


class _Followed:
    """What the observer remembers of a live request."""

    __slots__ = ("has_token", "message", "planned", "request", "running")

    def __init__(self, request: LiveRequest) -> None:
        self.request = request
        self.planned = 0  # the attempt whose plan was told
        self.has_token = request.first_token_s is not None
        self.message = ""  # why it failed, before its state says so
        self.running: dict[int, tuple[str, ...]] = {}  # chunks that compute, and where


class Observer:
    """Follows one machine."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self._requests: dict[str, _Followed] = {}
        self._cards: dict[str, events.InstanceJoined] = {}
        self._usage: dict[str, board.Usage] = {}
        self._fleet: board.Fleet | None = None
        self._now_s = 0.0
        self._on_event: Mapping[type, Callable[[Any], Iterable[board.BoardEvent]]] = {
            events.InstanceJoined: self._joined,
            events.InstanceLeft: self._left,
            events.InstanceCordoned: self._cordoned,
            events.Reported: self._reported,
            events.Submitted: self._submitted,
            events.Tick: self._levels,
            events.PolicyChanged: self._settings,
            events.ImprovementRateChanged: self._settings,
        }
        self._on_effect: Mapping[type, Callable[[Any], Iterable[board.BoardEvent]]] = {
            fx.Place: self._placed,
            fx.RunPrefill: self._sent,
            fx.Refuse: self._refused,
            fx.Fail: self._failed,
            fx.Stalled: self._stalled,
            fx.Record: self._recorded,
        }
        self._on_report: Mapping[type, Callable[[str, Any], Iterable[board.BoardEvent]]] = {
            reports.ChunkStarted: self._chunk_started,
            reports.ChunkSuspended: self._chunk_suspended,
            reports.ChunkFinished: self._chunk_finished,
            reports.Draining: self._instance_changed,
        }

    def present(self, now_s: float) -> list[board.BoardEvent]:
        """Returns events that describe the instances and the live requests as they are now."""
        self._now_s = now_s
        found: list[board.BoardEvent] = []
        for instance in self._machine.cluster.instances.values():
            found += self._seen(instance)
        for request in self._machine.requests.values():
            found += self._came(request)
            if request.kv_instance_ids:
                found.append(board.Placed(id=request.id, kv_ids=request.kv_instance_ids))
            if request.chunks:
                found += self._planned(self._requests[request.id])
            found.append(board.State(id=request.id, state=request.state.value))
            if request.running_since_s is not None:
                found += self._runs(request, request.chunks_done)
        return found + list(self._levels())

    def saw(
        self, event: events.Event, effects: Iterable[fx.Effect], now_s: float
    ) -> list[board.BoardEvent]:
        """Returns what happened in the step that took `event` and returned `effects`."""
        self._now_s = now_s
        on_event = self._on_event.get(type(event))
        found = [] if on_event is None else list(on_event(event))
        for effect in effects:
            if (on_effect := self._on_effect.get(type(effect))) is not None:
                found += on_effect(effect)
        return found

    # ---- events

    def _joined(self, event: events.InstanceJoined) -> Iterable[board.BoardEvent]:
        instance = self._machine.cluster.instances.get(event.instance_id)
        if instance is None or instance.card is not event:
            return ()  # of an earlier incarnation
        return self._seen(instance)

    def _left(self, event: events.InstanceLeft) -> Iterable[board.BoardEvent]:
        card = self._cards.get(event.instance_id)
        if card is None or card.generation != event.generation:
            return ()
        return self._forget(event.instance_id)

    def _cordoned(self, event: events.InstanceCordoned) -> Iterable[board.BoardEvent]:
        return self._instance_changed(event.instance_id)

    def _reported(self, event: events.Reported) -> Iterable[board.BoardEvent]:
        handler = self._on_report.get(type(event.report))
        current = self._machine.cluster.current(event.instance_id, event.generation)
        if handler is None or current is None:
            return ()
        return handler(event.instance_id, event.report)

    def _submitted(self, event: events.Submitted) -> Iterable[board.BoardEvent]:
        request = self._machine.requests.get(event.request.id)
        if request is None:
            request = LiveRequest(event.request)  # refused, or ended in this very step
        elif request.spec is not event.request:
            return ()  # a duplicate
        return self._came(request)

    # ---- instances

    def _seen(self, instance: Instance) -> Iterator[board.BoardEvent]:
        if instance.id in self._cards and self._cards[instance.id] is not instance.card:
            yield from self._forget(instance.id)
        card = self._cards[instance.id] = instance.card
        yield board.Instance(
            id=instance.id,
            role=card.role,
            model=card.model_hash,
            node=card.node,
            kv_pages=card.kv_pages,
            takes_work=not instance.draining,
        )

    def _instance_changed(
        self, instance_id: str, report: object = None
    ) -> Iterable[board.BoardEvent]:
        del report  # it carries nothing
        instance = self._machine.cluster.instances.get(instance_id)
        return () if instance is None else self._seen(instance)

    def _forget(self, instance_id: str) -> Iterator[board.BoardEvent]:
        del self._cards[instance_id]
        self._usage.pop(instance_id, None)
        yield board.InstanceGone(id=instance_id)

    # ---- levels

    def _levels(self, event: events.Event | None = None) -> Iterator[board.BoardEvent]:
        for instance in self._machine.cluster.instances.values():
            usage = _usage(instance, self._now_s)
            if self._usage.get(instance.id) != usage:
                self._usage[instance.id] = usage
                yield usage
        yield from self._settings()

    def _settings(self, event: events.Event | None = None) -> Iterator[board.BoardEvent]:
        machine = self._machine
        fleet = board.Fleet(
            policy=machine.policy,
            improvement_rate=machine.improvement_rate,
            queued=machine.queued,
            queued_s=round(machine.queued_s, 3),
            preemptions=machine.preemptions,
        )
        if fleet != self._fleet:
            self._fleet = fleet
            yield fleet

    # ---- requests

    def _came(self, request: LiveRequest) -> Iterator[board.BoardEvent]:
        self._requests[request.id] = _Followed(request)
        yield board.Arrived(
            id=request.id,
            slo_class=request.slo.class_name,
            tenant=request.tenant,
            prompt_tokens=request.prompt_tokens,
            max_new_tokens=request.max_new_tokens,
            ttft_slo_s=request.slo.ttft_s,
            since_s=max(0.0, round(self._now_s - request.arrival_s, 6)),
        )

    def _chunk_started(
        self, instance_id: str, report: reports.ChunkStarted
    ) -> Iterable[board.BoardEvent]:
        request = self._machine.requests.get(report.request_id)
        if request is None or request.id not in self._requests:
            return ()
        if not request.chunks:  # a mixed instance, which cuts the prompt itself
            return self._begins(request, report.chunk_index, request.prompt_tokens, (instance_id,))
        is_leader = any(
            chunk.index == report.chunk_index and chunk.instance_ids[0] == instance_id
            for chunk in request.chunks
        )
        return self._runs(request, report.chunk_index) if is_leader else ()

    def _runs(self, request: LiveRequest, index: int) -> Iterator[board.BoardEvent]:
        for chunk in request.chunks:
            if chunk.index == index:
                yield from self._begins(request, index, chunk.num_tokens, chunk.instance_ids)

    def _begins(
        self, request: LiveRequest, index: int, tokens: int, instances: tuple[str, ...]
    ) -> Iterator[board.BoardEvent]:
        running = self._requests[request.id].running
        if index not in running:
            running[index] = instances
            yield board.ChunkRuns(id=request.id, chunk=index, tokens=tokens, instances=instances)

    def _chunk_suspended(
        self, instance_id: str, report: reports.ChunkSuspended
    ) -> Iterable[board.BoardEvent]:
        followed = self._requests.get(report.request_id)
        by = () if followed is None else followed.request.waits.suspended_by
        return self._stops(report.request_id, report.chunk_index, instance_id, "suspended", by)

    def _chunk_finished(
        self, instance_id: str, report: reports.ChunkFinished
    ) -> Iterable[board.BoardEvent]:
        return self._stops(report.request_id, report.chunk_index, instance_id, "done")

    def _stops(
        self, request_id: str, index: int, instance_id: str, why: str, by: tuple[str, ...] = ()
    ) -> Iterator[board.BoardEvent]:
        followed = self._requests.get(request_id)
        if followed is not None and instance_id in followed.running.get(index, ()):
            del followed.running[index]
            yield board.ChunkStops(id=request_id, chunk=index, why=why, by=by)

    # ---- effects

    def _placed(self, effect: fx.Place) -> Iterable[board.BoardEvent]:
        followed = self._requests.get(effect.request_id)
        if followed is None:
            return
        yield board.Placed(
            id=effect.request_id,
            kv_ids=followed.request.kv_instance_ids or (effect.decode_id,),
            predicted_ttft_s=round(effect.predicted_ttft_s, 6),
        )

    def _sent(self, effect: fx.RunPrefill) -> Iterable[board.BoardEvent]:
        followed = self._requests.get(effect.request_id)
        if followed is None or followed.planned == effect.attempt:
            return ()  # every instance of the plan gets one of these effects
        return self._planned(followed, effect)

    def _planned(
        self, followed: _Followed, effect: fx.RunPrefill | None = None
    ) -> Iterator[board.BoardEvent]:
        request = followed.request
        attempt = request.attempt if effect is None else effect.attempt
        chunks = request.chunks if effect is None else effect.chunks
        followed.planned = attempt
        yield board.Planned(id=request.id, attempt=attempt, chunks=chunks)

    def _refused(self, effect: fx.Refuse) -> Iterable[board.BoardEvent]:
        if self._requests.pop(effect.request_id, None) is not None:
            yield board.State(id=effect.request_id, state="refused", message=effect.message)

    def _failed(self, effect: fx.Fail) -> Iterable[board.BoardEvent]:
        if (followed := self._requests.get(effect.request_id)) is not None:
            followed.message = effect.message
        return ()

    def _stalled(self, effect: fx.Stalled) -> Iterable[board.BoardEvent]:
        names = ", ".join(effect.request_ids)
        yield board.Notice(text=f"prefill stood still: requests {names} are planned again")

    def _recorded(self, effect: fx.Record) -> Iterable[board.BoardEvent]:
        followed = self._requests.get(effect.request_id)
        if followed is None:
            return
        if effect.state in _COMPUTES_NOTHING:
            for chunk in list(followed.running):
                del followed.running[chunk]
                yield board.ChunkStops(id=effect.request_id, chunk=chunk, why="lost")
        yield from self._first_token(followed)
        yield board.State(id=effect.request_id, state=effect.state.value, message=followed.message)
        if effect.state.is_final:
            del self._requests[effect.request_id]

    def _first_token(self, followed: _Followed) -> Iterator[board.BoardEvent]:
        request = followed.request
        if followed.has_token or request.first_token_s is None:
            return
        followed.has_token = True
        in_time = None
        if request.allowed_ttft_s is not None:
            in_time = request.first_token_s <= request.deadline_s
        ttft_s = round(request.first_token_s - request.arrival_s, 6)
        yield board.FirstToken(id=request.id, ttft_s=ttft_s, in_time=in_time)


def _usage(instance: Instance, now_s: float) -> board.Usage:
    if isinstance(instance, PrefillInstance):
        running = sum(task.started_s is not None for task in instance.queue)
        return board.Usage(
            id=instance.id,
            used_pages=instance.used_pages,
            running=running,
            waiting=len(instance.queue) - running,
            queue_s=round(instance.outstanding_s(now_s), 3),
        )
    used_pages = instance.card.kv_pages - instance.open_pages
    if not isinstance(instance, DecodeInstance):
        return board.Usage(id=instance.id, used_pages=used_pages, running=len(instance.holdings))
    running = instance.batch_size
    waiting = max(instance.sequences - running, 0)
    return board.Usage(id=instance.id, used_pages=used_pages, running=running, waiting=waiting)
