"""Prefill instances and their groups: commands, spans of computing, the requests they hold.

`effects.RunPrefill`, `Order` and `CancelOn` say what an instance does. The rule of live instances
picks what runs and starts and stops groups (`prefill_instance`). `prefill_work` has the times: how
long work takes, where it may stop (FlowPrefill sections 5.1 and 6.4: blocking time), and how much
time a growing group adds.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from millrace.core.errors import IntegrityError
from millrace.core.instance.stop_point import StopPoint
from millrace.core.request import Chunk
from millrace.core.scheduler.effects import CancelOn, ChunkRef, Order, RunPrefill
from millrace.core.scheduler.reports import (
    ChunkFinished,
    ChunkStarted,
    ChunkSuspended,
    RequestReleased,
)
from millrace.sim.cluster.job import Attempt, Job, Task
from millrace.sim.cluster.world import World
from millrace.sim.models.chunk_faults import ChunkFaults, error_of
from millrace.sim.models.decode_model import DecodePool
from millrace.sim.models.landing import Landing
from millrace.sim.models.prefill_instance import PrefillInstance
from millrace.sim.models.prefill_spans import PrefillSpans
from millrace.sim.models.prefill_work import Balancing, PrefillTimes
from millrace.sim.models.transfer_model import Transfers


class PrefillPool:
    """All prefill instances. After commands and callbacks the loop calls `settle`."""

    def __init__(self, world: World, decode: DecodePool) -> None:
        self.instances: dict[str, PrefillInstance] = {}
        self._world = world
        self._clock = world.clock
        self._tally = world.tally
        self._decode = decode
        self._granularity = world.spec.scheduler.preemption
        self._finest = StopPoint.of(self._granularity)
        self.times = PrefillTimes(world.spec.profile, world.spec.max_chunk_tokens)
        self._balancing = Balancing(world.spec, self.times)
        self._transfers = Transfers(world.spec, world.clock, world.tally, self._landed)
        self._spans = PrefillSpans(world)
        self._landing = Landing(world, self.times, self._transfers)
        self._faults = ChunkFaults(world.spec)
        self.changed: dict[PrefillInstance, None] = {}  # to be settled

    # ---- commands

    def run(self, instance: PrefillInstance, effect: RunPrefill, job: Job) -> None:
        """Queues the chunks that name the instance."""
        attempt = job.attempt
        if attempt is None or attempt.closed:
            attempt = job.attempt = Attempt(
                job, effect.chunks, self._decode.instances.get(effect.decode_id), effect.attempt
            )
            job.attempts += 1
        if effect.request_id in instance.held:
            raise IntegrityError(f"{instance.id} got {effect.request_id}, which it still holds")
        instance.held[effect.request_id] = attempt
        attempt.instances[instance] = None
        for task in attempt.tasks:
            if instance.id in task.parts[0][1].instance_ids:
                task.members.append(instance)
                instance.add(task)
        self.changed[instance] = None

    def order(self, instance: PrefillInstance, effect: Order) -> None:
        """Replaces the queue. References to finished or dropped work are skipped."""
        queue: list[Task] = []
        held = instance.held
        for refs in effect.queue:
            task: Task | None = None
            if len(refs) == 1:
                attempt = held.get(refs[0].request_id)
                if attempt is None or attempt.closed:
                    continue
                task = attempt.tasks[refs[0].chunk_index]
            if task is None or len(task.parts) > 1:
                task = self._batch(instance, refs)
            if task is not None and not task.finished:
                queue.append(task)
        instance.order(queue)
        self.changed[instance] = None

    def _batch(self, instance: PrefillInstance, refs: tuple[ChunkRef, ...]) -> Task | None:
        """Returns the task that computes exactly these, or a new task.

        A task that has begun stays as it is.
        """
        parts: list[tuple[Attempt, Chunk]] = []
        for ref in refs:
            attempt = instance.held.get(ref.request_id)
            if attempt is not None and not attempt.closed:
                task = attempt.tasks[ref.chunk_index]
                if task.begun and not task.finished:
                    return task
                if not task.finished:
                    parts.append((attempt, attempt.chunks[ref.chunk_index]))
        if not parts:
            return None
        task = parts[0][0].tasks[parts[0][1].index]
        if task.parts == parts:
            return task
        batch = Task(parts)
        batch.members = list(task.members)
        for attempt, chunk in parts:
            instance.remove(attempt.tasks[chunk.index])
            attempt.tasks[chunk.index] = batch
        instance.add(batch)
        return batch

    def cancel(self, instance: PrefillInstance, effect: CancelOn) -> None:
        """Drops the request, at the next boundary if it runs."""
        attempt = instance.held.get(effect.request_id)
        if attempt is None:
            return
        self._close(attempt)
        running = instance.running
        if running is not None and any(part[0] is attempt for part in running.parts):
            if all(part[0].closed for part in running.parts):
                instance.cancelled[attempt] = None
                if running.signal_s is None:
                    self._signal(running)
                return
            self._leave_batch(running, attempt)
        self._release(instance, attempt)

    def _leave_batch(self, task: Task, attempt: Attempt) -> None:
        """Removes a request from a batch. The pass keeps its length, for all its tokens."""
        task.parts = [part for part in task.parts if part[0] is not attempt]

    def _close(self, attempt: Attempt) -> None:
        if not attempt.closed:
            attempt.closed = True
            self._transfers.release(attempt)

    def _release(
        self, instance: PrefillInstance, attempt: Attempt, *, complete: bool = False
    ) -> None:
        """Frees all that the instance holds of the request, and reports it."""
        job_id = attempt.job.id
        del instance.held[job_id]
        del attempt.instances[instance]
        for task in attempt.tasks:
            if task.is_of(attempt):
                instance.remove(task)
            elif not task.finished:
                self._leave_batch(task, attempt)
        self.changed[instance] = None
        self._world.report(
            instance.id, instance.generation, RequestReleased(request_id=job_id, complete=complete)
        )

    # ---- what runs

    def settle(self) -> None:
        """Starts and stops tasks as the rules of the `changed` instances ask."""
        self._exchange()
        changed, self.changed = self.changed, {}
        for instance in changed:
            if not instance.alive:
                continue
            running = instance.running
            if running is not None:
                self._steer(running, instance)
            elif instance.tasks:
                task = instance.take_next()
                if task is not None:
                    self._take_up(task, instance)
                    self._start(task)
                elif instance.waits_since_s is None:
                    instance.waits_since_s = self._clock.now_s
            if instance.rule.outgoing:
                self.changed[instance] = None

    def _exchange(self) -> None:
        """Delivers the messages between the members of groups."""
        senders = deque(self.changed)
        while senders:
            sender = senders.popleft()
            outgoing = sender.rule.outgoing
            while outgoing:
                receiver_id, payload = outgoing.popleft()
                receiver = self.instances.get(receiver_id)
                if receiver is not None and receiver.alive and sender.alive:
                    receiver.rule.receive(sender.id, payload)
                    self.changed[receiver] = None
                    senders.append(receiver)

    def _steer(self, running: Task, instance: PrefillInstance) -> None:
        if running.signal_s is None:
            if instance.wants_other:
                self._signal(running)
        elif len(running.members) == 1 and not instance.wants_other:
            running.signal_s = None  # taken back before it took effect
            running.signals += 1

    def _take_up(self, task: Task, first: PrefillInstance) -> None:
        """Starts the task at `first`, and at the other members."""
        for member in task.members:
            if member is not first and member.take_next() is not task:
                raise IntegrityError(f"{member.id} does not start what {first.id} starts")

    def _start(self, task: Task) -> None:
        now_s = self._clock.now_s
        if not task.begun:
            self._begin(task)
        self._spans.started(task)
        for attempt, chunk in task.parts:
            self._report(ChunkStarted, task, attempt, chunk)
        end_s = now_s + (task.work_s - task.done_s) * task.factor
        self._clock.at(end_s, self._ended, (task, task.span))

    def _begin(self, task: Task) -> None:
        task.begun = True
        task.begun_s = self._clock.now_s
        chunk = task.parts[0][1]
        sp = len(task.members)
        task.work_s = self.times.work_s(task.sequences, sp)
        if chunk.index:
            before = len(task.parts[0][0].chunks[chunk.index - 1].instance_ids)
            one_node = len({member.node for member in task.members}) == 1
            added_s = self._balancing.added_s(chunk, before, one_node=one_node)
            self._tally.balancing_s += added_s
            task.work_s += added_s
        else:
            task.work_s += self._balancing.fetched_s(chunk)
            for attempt, _ in task.parts:
                if attempt.job.plan.output_tokens > 1:
                    self._transfers.begin(attempt)
        task.factor = self._world.noise() * self._faults.factor(task.members, task.begun_s)
        task.failing = self._faults.failing(task.members, task.begun_s)
        if task.failing is not None:
            task.work_s = 0.0

    def _signal(self, task: Task) -> None:
        """Asks the running task to stop at its next boundary."""
        now_s = self._clock.now_s
        task.signal_s = now_s
        task.signals += 1
        assert task.started_s is not None  # it runs
        position_s = task.done_s + (now_s - task.started_s) / task.factor
        boundary_s = self.times.boundary_s(
            task.sequences, len(task.members), position_s, self._granularity
        )
        # Balancing comes on top of the profile's seconds: a stop in that rest is at the very end.
        if boundary_s < task.work_s - 1e-12 and position_s <= boundary_s:
            stop_s = now_s + (boundary_s - position_s) * task.factor
            self._clock.at(stop_s, self._stopped, (task, task.span, task.signals, boundary_s))

    def _stopped(self, what: tuple[Task, int, int, float]) -> None:
        task, span, signals, boundary_s = what
        if task.started_s is None or task.span != span or task.signals != signals:
            return
        task.done_s = boundary_s
        self._end_span(task)
        self._tally.preemptions += not all(attempt.closed for attempt, _ in task.parts)
        for member in task.members:
            member.leave(task)
        for attempt, chunk in task.parts:
            if not attempt.closed:
                self._report(ChunkSuspended, task, attempt, chunk, compute_s=task.compute_s)
        self._let_go(task)

    def _ended(self, what: tuple[Task, int]) -> None:
        task, span = what
        if task.started_s is None or task.span != span:
            return
        task.finished = True
        self._end_span(task)
        for member in task.members:
            member.remove(task)
        if task.failing is not None:
            self._fail(task, task.failing)
            return
        self._tally.chunks += 1
        for attempt, chunk in task.parts:
            self._tally.prefill_tokens += chunk.num_tokens
            if not attempt.closed:
                self._chunk_done(task, attempt, chunk)
        self._let_go(task)

    def _fail(self, task: Task, instance: PrefillInstance) -> None:
        """Ends the task's requests at the instance. The machine cancels them at all others."""
        self._tally.failed_chunks += 1
        for attempt in [part[0] for part in task.parts]:
            if not attempt.closed:
                self._close(attempt)
                self._world.report(instance.id, instance.generation, error_of(attempt))
                self._release(instance, attempt)
        self._let_go(task)

    def _chunk_done(self, task: Task, attempt: Attempt, chunk: Chunk) -> None:
        attempt.done += 1
        job, sp = attempt.job, len(task.members)
        last = attempt.done == len(attempt.chunks)
        if last:
            job.chunks = len(attempt.chunks)
            job.sp = sp
        self._report(ChunkFinished, task, attempt, chunk, compute_s=task.compute_s, last=last)
        if not last:
            for member in attempt.tasks[attempt.done].members:
                self.changed[member] = None
        if job.plan.output_tokens > 1:
            tokens = self.times.last_pass_tokens(chunk.num_tokens, sp)
            self._transfers.chunk_computed(attempt, chunk, task.begun_s, tokens)
        if last:
            job.first_token_s = self._clock.now_s
            job.idle_since_s = None
            if job.plan.output_tokens > 1:
                self._transfers.finish(attempt)
            else:
                self._decode.only_token(attempt)
                self._landed(attempt)

    def _end_span(self, task: Task) -> None:
        self._spans.ended(task)
        for member in task.members:
            self.changed[member] = None

    def _let_go(self, task: Task) -> None:
        """Frees work that was cancelled while the task ran."""
        for member in task.members:
            if member.cancelled:
                cancelled, member.cancelled = member.cancelled, {}
                for attempt in cancelled:
                    self._release(member, attempt)

    def _landed(self, attempt: Attempt) -> None:
        """Notes that all of the request's KV is at decode, or that it needs none there."""
        attempt.closed = True
        if attempt.job.plan.output_tokens > 1:
            self._decode.landed(attempt)
        for instance in list(attempt.instances):
            self._release(instance, attempt, complete=True)
        if attempt.job.attempt is attempt:
            attempt.job.attempt = None

    # ---- incarnations

    def join(self, instance_id: str, generation: int, node: str) -> None:
        self.instances[instance_id] = PrefillInstance(instance_id, generation, node, self._finest)

    def leave(self, instance: PrefillInstance) -> None:
        """Removes an instance that dies, with all it held; groups that it was part of stop."""
        instance.alive = False
        running = instance.running
        for attempt in list(instance.held.values()):
            if not attempt.closed:
                self._landing.report(attempt)
            self._close(attempt)
            del attempt.instances[instance]
        instance.held.clear()
        instance.cancelled.clear()
        if running is not None:
            self._end_span(running)
            for member in running.members:
                if member is not instance:
                    member.leave(running)
            self._let_go(running)
        instance.tasks.clear()

    def is_idle(self, instance: PrefillInstance) -> bool:
        """Returns whether it holds nothing, so that a draining instance may leave."""
        return not instance.held

    def check_empty(self) -> None:
        """Raises IntegrityError when an instance holds anything."""
        for instance in self.instances.values():
            if instance.alive and (instance.held or instance.tasks):
                raise IntegrityError(
                    f"{instance.id} still holds {sorted(instance.held)}, "
                    f"{len(instance.tasks)} tasks are queued"
                )

    def _report(
        self,
        kind: type[ChunkStarted | ChunkSuspended | ChunkFinished],
        task: Task,
        attempt: Attempt,
        chunk: Chunk,
        **more: Any,  # noqa: ANN401 - fields of the kind
    ) -> None:
        """Sends the group's leader's report on one of the task's requests."""
        leader_id = chunk.instance_ids[0]
        leader = task.members[0]
        if leader.id != leader_id:
            leader = next(member for member in task.members if member.id == leader_id)
        report = kind(request_id=attempt.job.id, chunk_index=chunk.index, **more)
        self._world.report(leader_id, leader.generation, report)
