"""Decode instances: they admit requests, receive KV, and run a batch (see `batch`).

With KV parallelism (Mnemosyne section 4.4) a long request's context is spread over workers, as the
machine has placed it; a step reads the largest share of it and pays the degree's communication.
"""

from __future__ import annotations

from collections import deque

from millrace.core.errors import IntegrityError
from millrace.core.scheduler.reports import DecodeStarted, RequestReleased
from millrace.sim.cluster.batch import Batch
from millrace.sim.cluster.job import Attempt, Job
from millrace.sim.cluster.world import World
from millrace.sim.models.transfer_model import Backends


class DecodeInstance:
    """One incarnation of a decode instance."""

    __slots__ = ("alive", "backends", "batch", "expected", "generation", "id", "plans", "waiting")

    def __init__(self, instance_id: str, generation: int, backends: int) -> None:
        self.id = instance_id
        self.generation = generation
        self.alive = True
        self.backends = Backends(backends)
        self.expected: dict[str, Job] = {}  # admitted; their KV has not all landed
        self.waiting: deque[tuple[Job, float]] = deque()  # landed, but the batch is full
        self.batch = Batch()
        self.plans = 0  # tells the latest callback from earlier callbacks


class DecodePool:
    """All decode instances."""

    def __init__(self, world: World) -> None:
        self.instances: dict[str, DecodeInstance] = {}
        self._world = world
        self._clock = world.clock
        self._tally = world.tally
        self._operators = world.spec.decoding.operators
        self._max_batch = world.spec.max_batch

    # ---- commands, and what transfers bring

    def admit(self, instance: DecodeInstance, job: Job) -> None:
        """Admits a request: the machine reserved its pages at this instance."""
        instance.expected[job.id] = job

    def landed(self, attempt: Attempt) -> None:
        """Notes that all of a request's KV has landed: it joins the batch if the batch has a
        slot."""
        instance, job = attempt.decode, attempt.job
        if instance is None or not instance.alive or instance.expected.pop(job.id, None) is None:
            return
        if len(instance.batch) >= self._max_batch:
            instance.waiting.append((job, self._clock.now_s))
            return
        self._sync(instance)
        self._join(instance, job)
        self._plan(instance)

    def only_token(self, attempt: Attempt) -> None:
        """Ends a request whose only token came from prefill: there is nothing to decode."""
        instance, job = attempt.decode, attempt.job
        if instance is None or not instance.alive or instance.expected.pop(job.id, None) is None:
            return
        self._world.served(instance.id, instance.generation, job)

    def cancel(self, instance: DecodeInstance, request_id: str) -> None:
        """Drops a request; harmless when the instance does not hold it."""
        job = instance.expected.pop(request_id, None)
        if job is None:
            waiting = [entry for entry in instance.waiting if entry[0].id == request_id]
            if waiting:
                instance.waiting.remove(waiting[0])
                job = waiting[0][0]
            elif request_id in instance.batch.members:
                self._sync(instance)
                job = self._leave(instance, request_id)
                self._fill(instance)
                self._plan(instance)
            else:
                return
        released = RequestReleased(request_id=request_id, attempt=job.placement)
        self._world.report(instance.id, instance.generation, released)

    # ---- the batch

    def _sync(self, instance: DecodeInstance) -> None:
        self._tally.busy("decode", instance.batch.sync(self._clock.now_s))

    def _join(self, instance: DecodeInstance, job: Job) -> None:
        self._world.onboard(job, job.plan.input_tokens)
        instance.batch.join(job, self._clock.now_s)
        self._world.report(instance.id, instance.generation, DecodeStarted(request_id=job.id))

    def _leave(self, instance: DecodeInstance, request_id: str) -> Job:
        sequence = instance.batch.leave(request_id)
        self._world.left_batch(instance.id, sequence)
        return sequence.job

    def _fill(self, instance: DecodeInstance) -> None:
        while instance.waiting and len(instance.batch) < self._max_batch:
            job, since_s = instance.waiting.popleft()
            self._tally.decode_wait_s += self._clock.now_s - since_s
            self._join(instance, job)

    def _plan(self, instance: DecodeInstance) -> None:
        instance.plans += 1
        if not instance.batch.members:
            return
        end_s, step_s = instance.batch.plan(self._clock.now_s, self._step_s)
        if step_s > self._tally.longest_step_s:
            self._tally.longest_step_s = step_s
        self._clock.at(end_s, self._reached, (instance, instance.plans))

    def _step_s(self, batch: Batch, context: float) -> float:
        degree = batch.degree
        return self._operators.decode_step_s(len(batch), round(context * degree), degree)

    def _reached(self, what: tuple[DecodeInstance, int]) -> None:
        instance, plans = what
        if not instance.alive or instance.plans != plans:
            return
        self._tally.busy("decode", instance.batch.sync_to_end(self._clock.now_s))
        for sequence in instance.batch.leave_ended():
            self._world.left_batch(instance.id, sequence)
            self._world.served(instance.id, instance.generation, sequence.job)
        self._fill(instance)
        self._plan(instance)

    # ---- incarnations

    def join(self, instance_id: str, generation: int) -> None:
        self.instances[instance_id] = DecodeInstance(
            instance_id, generation, self._world.spec.backends
        )

    def leave(self, instance: DecodeInstance) -> None:
        """Removes an instance that dies, with all it held."""
        self._sync(instance)
        for request_id in list(instance.batch.members):
            self._leave(instance, request_id)
        instance.alive = False
        instance.expected.clear()
        instance.waiting.clear()

    def is_idle(self, instance: DecodeInstance) -> bool:
        """Returns whether it holds nothing, so that a draining instance may leave."""
        return not (instance.batch.members or instance.expected or instance.waiting)

    def check_empty(self) -> None:
        """Raises IntegrityError when an instance holds anything."""
        for instance in self.instances.values():
            if not instance.alive:
                continue
            backends = instance.backends
            if not self.is_idle(instance) or backends.leased or backends.waiting:
                raise IntegrityError(
                    f"{instance.id} still holds {sorted(instance.batch.members)} in its batch, "
                    f"{sorted(instance.expected)} to come, {len(instance.waiting)} waiting, "
                    f"{len(backends.leased)} backends"
                )
