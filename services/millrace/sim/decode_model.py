"""Decode instances: batches as a fluid between joins and leaves.

Between two changes of its members a batch of n sequences takes steps whose time grows with the
context that they read. The profile's step time is taken now and at the next leave, a straight line
put between the two, and the steps done by a time follow from a quadratic: no event per token. A
sequence that joins in the middle of a step takes part from the next one on. Very long stretches
are cut (`HORIZON_STEPS`), so that the straight line holds.

With KV parallelism (Mnemosyne section 4.4) a long request's context is spread over workers; the
step reads the longest shard's share of it and pays the degree's communication. Its degree is that
of its whole life: contexts grow by little while they decode.
"""

from __future__ import annotations

import math
from collections import deque
from heapq import heappop, heappush

from millrace.core import events
from millrace.core.errors import IntegrityError
from millrace.sim.job import Attempt, Job
from millrace.sim.transfer_model import Backends
from millrace.sim.world import World

#: Steps that one straight line covers at most.
HORIZON_STEPS = 512

_ROUNDING = 1e-6  # of a step


class Sequence:
    """A request in a batch."""

    __slots__ = ("degree", "end_step", "job", "joined_s")

    def __init__(self, job: Job, joined_s: float, end_step: int, degree: int) -> None:
        self.job = job
        self.joined_s = joined_s
        self.end_step = end_step
        self.degree = degree


class DecodeInstance:
    """One life of a decode instance."""

    __slots__ = (
        "alive",
        "backends",
        "batch",
        "context",
        "ends",
        "expected",
        "generation",
        "growth",
        "id",
        "plans",
        "since_s",
        "slope_s",
        "step_s",
        "steps",
        "target",
        "waiting",
    )

    def __init__(self, instance_id: str, generation: int, backends: int) -> None:
        self.id = instance_id
        self.generation = generation
        self.alive = True
        self.backends = Backends(backends)
        self.expected: dict[str, Job] = {}  # admitted; their KV has not all landed
        self.waiting: deque[tuple[Job, float]] = deque()  # landed, and the batch is full
        self.batch: dict[str, Sequence] = {}
        self.ends: list[tuple[int, str]] = []  # heap; of sequences that left early, too
        self.context = 0.0  # tokens that a step reads, at `since_s`
        self.growth = 0.0  # tokens that a step adds to it
        self.steps = 0.0  # done at `since_s`
        self.since_s = 0.0
        self.step_s = 0.0  # at `since_s`, and its growth a step
        self.slope_s = 0.0
        self.target = 0.0  # steps at the next callback
        self.plans = 0  # tells the latest callback from earlier ones


class DecodePool:
    """All decode instances."""

    def __init__(self, world: World) -> None:
        self.instances: dict[str, DecodeInstance] = {}
        self._world = world
        self._clock = world.clock
        self._tally = world.tally
        spec = world.spec
        self._operators = spec.decoding.operators
        self._max_batch = spec.max_batch
        self._shard_tokens = spec.max_kv_tokens_per_worker
        self._spare_workers = spec.kvp

    # ---- commands, and what transfers bring

    def admit(self, instance: DecodeInstance, job: Job) -> None:
        """The machine reserved its pages here."""
        instance.expected[job.id] = job

    def landed(self, attempt: Attempt) -> None:
        """All of a request's KV is here: it joins the batch if that has a place."""
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
        """Prefill's token was the only one: there is nothing to decode."""
        instance, job = attempt.decode, attempt.job
        if instance is None or not instance.alive or instance.expected.pop(job.id, None) is None:
            return
        self._finish(instance, job)

    def cancel(self, instance: DecodeInstance, request_id: str) -> None:
        """Drops a request; harmless when it is not here."""
        waiting = [entry for entry in instance.waiting if entry[0].id == request_id]
        if instance.expected.pop(request_id, None) is None:
            if waiting:
                instance.waiting.remove(waiting[0])
            elif request_id in instance.batch:
                self._sync(instance)
                self._leave(instance, request_id)
                self._fill(instance)
                self._plan(instance)
            else:
                return
        self._world.outbox.append(
            events.RequestReleased(
                instance_id=instance.id, generation=instance.generation, request_id=request_id
            )
        )

    # ---- the batch

    def _sync(self, instance: DecodeInstance) -> None:
        """Brings the batch's steps and context up to now."""
        now_s = self._clock.now_s
        elapsed_s = now_s - instance.since_s
        instance.since_s = now_s
        if not instance.batch or elapsed_s <= 0.0:
            return
        self._tally.busy("decode", elapsed_s)
        step_s, slope_s = instance.step_s, instance.slope_s
        done = 2.0 * elapsed_s / (step_s + math.sqrt(step_s * step_s + 2.0 * slope_s * elapsed_s))
        self._advance(instance, done)

    def _advance(self, instance: DecodeInstance, done: float) -> None:
        instance.steps += done
        instance.context += done * instance.growth

    def _join(self, instance: DecodeInstance, job: Job) -> None:
        plan = job.plan
        first = math.ceil(instance.steps - _ROUNDING)
        degree = self._degree(plan.input_tokens + plan.output_tokens)
        end_step = first + plan.output_tokens - 1
        instance.batch[job.id] = Sequence(job, self._clock.now_s, end_step, degree)
        heappush(instance.ends, (end_step, job.id))
        instance.context += (plan.input_tokens + 1 - (first - instance.steps)) / degree
        instance.growth += 1.0 / degree
        self._world.outbox.append(
            events.DecodeStarted(
                instance_id=instance.id, generation=instance.generation, request_id=job.id
            )
        )

    def _degree(self, tokens: int) -> int:
        """Workers that hold the request, as far as there are workers to spare."""
        if not self._shard_tokens:
            return 1
        further = min(-(-tokens // self._shard_tokens) - 1, self._spare_workers)
        self._spare_workers -= further
        self._tally.kvp_onboardings += further
        return further + 1

    def _leave(self, instance: DecodeInstance, request_id: str) -> Job:
        sequence = instance.batch.pop(request_id)
        plan, degree = sequence.job.plan, sequence.degree
        self._spare_workers += degree - 1
        context = plan.input_tokens + plan.output_tokens - (sequence.end_step - instance.steps)
        instance.context -= context / degree
        instance.growth -= 1.0 / degree
        if not instance.batch:
            instance.context = instance.growth = instance.steps = 0.0  # and no rounding builds up
            instance.ends.clear()
        if self._world.timeline is not None:
            self._world.timeline.block(
                instance.id, sequence.joined_s, self._clock.now_s, plan.index, "decode"
            )
        return sequence.job

    def _fill(self, instance: DecodeInstance) -> None:
        while instance.waiting and len(instance.batch) < self._max_batch:
            job, since_s = instance.waiting.popleft()
            self._tally.decode_wait_s += self._clock.now_s - since_s
            self._join(instance, job)

    def _plan(self, instance: DecodeInstance) -> None:
        """Sets the straight line of step times and the callback at its end."""
        batch, ends = instance.batch, instance.ends
        instance.plans += 1
        if not batch:
            return
        while ends[0][1] not in batch or batch[ends[0][1]].end_step != ends[0][0]:
            heappop(ends)
        steps = min(max(ends[0][0] - instance.steps, _ROUNDING), HORIZON_STEPS)
        step_s = self._step_s(instance, instance.context)
        last_s = self._step_s(instance, instance.context + steps * instance.growth)
        instance.step_s = step_s
        instance.slope_s = max((last_s - step_s) / steps, 0.0)
        instance.target = instance.steps + steps
        if last_s > self._tally.longest_step_s:
            self._tally.longest_step_s = last_s
        time_s = steps * (step_s + instance.slope_s * steps / 2.0)
        self._clock.at(self._clock.now_s + time_s, self._reached, (instance, instance.plans))

    def _step_s(self, instance: DecodeInstance, context: float) -> float:
        batch = instance.batch
        if not self._shard_tokens:
            return self._operators.decode_step_s(len(batch), context)
        degree = max(sequence.degree for sequence in batch.values())
        return self._operators.decode_step_s(len(batch), context * degree, degree)

    def _reached(self, what: tuple[DecodeInstance, int]) -> None:
        instance, plans = what
        if not instance.alive or instance.plans != plans:
            return
        now_s = self._clock.now_s
        self._tally.busy("decode", now_s - instance.since_s)
        instance.since_s = now_s
        self._advance(instance, instance.target - instance.steps)
        instance.steps = float(instance.target)
        ends = instance.ends
        while ends and ends[0][0] <= instance.steps + _ROUNDING:
            end_step, request_id = heappop(ends)
            sequence = instance.batch.get(request_id)
            if sequence is not None and sequence.end_step == end_step:
                self._finish(instance, self._leave(instance, request_id))
        self._fill(instance)
        self._plan(instance)

    def _finish(self, instance: DecodeInstance, job: Job) -> None:
        self._world.finished(job)
        self._world.outbox.append(
            events.RequestFinished(
                instance_id=instance.id,
                generation=instance.generation,
                request_id=job.id,
                reason="length",
                generated_tokens=job.plan.output_tokens,
            )
        )

    # ---- lives

    def join(self, instance_id: str, generation: int) -> None:
        self.instances[instance_id] = DecodeInstance(
            instance_id, generation, self._world.spec.backends
        )

    def leave(self, instance: DecodeInstance) -> None:
        """It dies: what it held is gone."""
        self._sync(instance)
        for request_id in list(instance.batch):
            self._leave(instance, request_id)
        instance.alive = False
        instance.expected.clear()
        instance.waiting.clear()

    def is_idle(self, instance: DecodeInstance) -> bool:
        """Whether it holds nothing, so that a draining one may go."""
        return not (instance.batch or instance.expected or instance.waiting)

    def check_empty(self) -> None:
        """Raises IntegrityError when an instance holds anything."""
        for instance in self.instances.values():
            if not instance.alive:
                continue
            backends = instance.backends
            if not self.is_idle(instance) or backends.leased or backends.waiting:
                raise IntegrityError(
                    f"{instance.id} still holds {sorted(instance.batch)} in its batch, "
                    f"{sorted(instance.expected)} to come, {len(instance.waiting)} waiting, "
                    f"{len(backends.leased)} backends"
                )
