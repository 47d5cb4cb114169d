"""Mixed instances: prefill and decode in the same batches, as in Medha (sections 3.3 and 4).

While there is prefill to do, an instance runs iteration by iteration: the policy ranks its
prefills, `core.instance.packing` fills a batch with them beside the decodes, and the operator model
gives its time. Without prefill, decodes continue as a fluid (see `batch`).

Stream pipeline parallelism (SPP, Mnemosyne section 4.3): of s stages the first is free for the next
iteration as soon as it has passed this iteration on (dense schedule). So iterations follow each
other at the time of a stage, and their results are known s - 1 stages later. A request's next token
needs its last token, so a decode takes part in one of s successive iterations. A stage's launch
overhead does not shrink with its share of the layers; transfers between stages are left out.

KV parallelism (section 4.4): the machine decides where a long request's KV goes
(`core.scheduler.fleet.kvp_placement`). Workers take part when its context reaches their shards, and
a pass waits for the worker that has most of it. The further workers' other work is not modelled.
"""

from __future__ import annotations

import math
from operator import itemgetter

from millrace.core.arithmetic import ceil_div
from millrace.core.cost.operators import BatchShape
from millrace.core.errors import IntegrityError
from millrace.core.instance.packing import Packer, PassModel
from millrace.core.instance.prompt_order import PromptOrder
from millrace.core.live_request import LiveRequest
from millrace.core.priority.lars import relative_slack
from millrace.core.scheduler.reports import ChunkFinished, DecodeStarted, RequestReleased
from millrace.sim.cluster.batch import Batch
from millrace.sim.cluster.job import Job
from millrace.sim.cluster.sharded_passes import LimitedPasses, filled_pass_s, held
from millrace.sim.cluster.world import World
from millrace.sim.models.mixed_latency import mixed_latency


class Prefill:
    """A prompt that a mixed instance computes."""

    __slots__ = ("done", "job", "request")

    def __init__(self, job: Job) -> None:
        given = job.live
        assert given is not None  # the machine has accepted it
        self.job = job
        self.done = 0  # tokens computed
        # The instance's own copy: `executed_s` advances here chunk by chunk.
        self.request = LiveRequest(given.spec)
        self.request.due_by(given.deadline_s)
        self.request.accept(given.order)
        self.request.predict(given.predicted_prefill_s, 0.0)

    def degree(self, tokens: int) -> int:
        """Returns the workers that take part in a chunk of so many tokens."""
        spread = self.job.spread
        return 1 if spread is None else spread.degree(self.done + tokens)

    def longest_part(self) -> int:
        """Returns the tokens of its history at the worker that has most."""
        spread = self.job.spread
        if spread is None or not self.done:
            return self.done
        return round(max(tokens for _, tokens in held(spread, self.done)))


class MixedInstance:
    """One incarnation of a mixed instance."""

    __slots__ = (
        "alive",
        "alone",
        "batch",
        "generation",
        "id",
        "leaving",
        "order",
        "plans",
        "prefills",
        "running",
    )

    def __init__(self, instance_id: str, generation: int, policy: str) -> None:
        self.id = instance_id
        self.generation = generation
        self.alive = True
        self.batch = Batch()
        self.prefills: dict[str, Prefill] = {}
        self.order = PromptOrder(policy)  # of `prefills`
        self.leaving: dict[str, Prefill] = {}  # computed, their last iteration is in the pipeline
        self.running: list[tuple[Prefill, int]] | None = None  # the iteration in stage 1
        self.alone = False  # decodes continue as a fluid
        self.plans = 0  # tells the fluid's latest callback from earlier callbacks


class MixedPool:
    """All mixed instances."""

    def __init__(self, world: World) -> None:
        self.instances: dict[str, MixedInstance] = {}
        self._world = world
        self._clock = world.clock
        self._tally = world.tally
        spec = world.spec
        self._operators = spec.profile.operators
        self._stages = spec.spp
        self._policy = spec.scheduler.policy
        model: PassModel = self._operators
        if most := spec.scheduler.max_kv_tokens_per_worker:
            pages = max(most // spec.page_tokens, 1)
            model = LimitedPasses(self._operators, pages * spec.page_tokens)
        if spec.packing is not None:
            self._alone_s = mixed_latency(spec).chunk_s
        self._packer = None if spec.packing is None else Packer(model, spec.packing)
        self.changed: dict[MixedInstance, None] = {}  # to be settled

    # ---- commands

    def run(self, instance: MixedInstance, job: Job) -> None:
        """Takes in a prompt to compute, and then to decode."""
        prefill = instance.prefills[job.id] = Prefill(job)
        instance.order.add(prefill.request, self._clock.now_s)
        job.attempts += 1
        job.chunks = 0
        self.changed[instance] = None

    def cancel(self, instance: MixedInstance, request_id: str) -> None:
        """Drops a request; harmless when the instance does not hold it.

        A running iteration continues.
        """
        prefill = instance.prefills.pop(request_id, None)
        if prefill is not None:
            instance.order.remove(prefill.request, self._clock.now_s)
        prefill = prefill or instance.leaving.pop(request_id, None)
        job = None if prefill is None else prefill.job
        if request_id in instance.batch.members:
            self._sync(instance)
            sequence = instance.batch.leave(request_id)
            self._world.left_batch(instance.id, sequence)
            job = sequence.job
        if job is None:
            return
        self.changed[instance] = None
        released = RequestReleased(request_id=request_id, attempt=job.placement)
        self._world.report(instance.id, instance.generation, released)

    def settle(self) -> None:
        """Starts the next iterations of the `changed` instances."""
        changed, self.changed = self.changed, {}
        for instance in changed:
            if not instance.alive or instance.running is not None:
                continue
            if instance.alone and instance.prefills:
                self._interrupt(instance)
            else:
                self._sync(instance)
                self._next(instance)

    def _interrupt(self, instance: MixedInstance) -> None:
        """Interrupts decodes that run alone: the new prefill joins when their step leaves stage
        1."""
        self._sync(instance)
        instance.plans += 1
        end_s = instance.batch.cut(self._clock.now_s, self._stages)
        self._clock.at(end_s, self._reached, (instance, instance.plans))

    # ---- iterations

    def _next(self, instance: MixedInstance) -> None:
        """Packs and starts an iteration; without room for prefill the decodes continue alone."""
        instance.plans += 1
        instance.alone = False
        packed = self._pack(instance) if instance.prefills else []
        if packed:
            self._iterate(instance, packed)
        elif instance.batch.members:
            instance.alone = True
            end_s, step_s = instance.batch.plan(self._clock.now_s, self._step_s)
            self._tally.longest_step_s = max(self._tally.longest_step_s, step_s)
            self._clock.at(end_s, self._reached, (instance, instance.plans))

    def _pack(self, instance: MixedInstance) -> list[tuple[Prefill, int]]:
        assert self._packer is not None  # the specification has one if there are mixed instances
        now_s = self._clock.now_s
        ordered = instance.order.ordered(now_s)
        decodes, context = self._decodes(instance)
        packer = self._packer.within(self._tightest_pace_s(instance))
        packed = packer.pack(
            decodes,
            context,
            [(request, instance.prefills[request.id].done) for request in ordered],
            lambda request: relative_slack(request, now_s),
        )
        return [(instance.prefills[request.id], tokens) for request, tokens in packed]

    def _tightest_pace_s(self, instance: MixedInstance) -> float:
        """Returns the tightest pace of the decodes that they could keep alone; infinite without
        any.
        """
        batch = instance.batch
        running = ((one, one.job.live) for one in batch.members.values())
        paced = [(live.pace_s, one) for one, live in running if live and live.pace_s < math.inf]
        for pace_s, one in sorted(paced, key=itemgetter(0)):
            context = round(one.context(batch.steps))
            degree = one.spread.degree(context) if one.spread else 1
            alone_s = self._operators.decode_step_s(1, context, degree)
            if self._per_stage(alone_s) * self._stages <= pace_s:
                return pace_s
        return math.inf

    def _decodes(self, instance: MixedInstance) -> tuple[int, int]:
        """Returns the sequences of an iteration, and the context that they read."""
        decodes = ceil_div(len(instance.batch), self._stages)
        return decodes, round(instance.batch.context / self._stages)

    def _iterate(self, instance: MixedInstance, packed: list[tuple[Prefill, int]]) -> None:
        now_s = self._clock.now_s
        for prefill, tokens in packed:
            job = prefill.job
            self._world.onboard(job, prefill.done + tokens)
            if job.first_start_s is None:
                job.first_start_s = now_s
            elif job.idle_since_s is not None:
                gap_s = now_s - job.idle_since_s
                job.suspended_s += gap_s
                job.longest_suspension_s = max(job.longest_suspension_s, gap_s)
            job.idle_since_s = None
        stage_s = self._stage_s(instance, packed)
        self._tally.longest_step_s = max(self._tally.longest_step_s, stage_s * self._stages)
        self._tally.busy("mixed", stage_s)
        instance.running = packed
        self._clock.at(now_s + stage_s, self._iterated, (instance, stage_s))

    def _stage_s(self, instance: MixedInstance, packed: list[tuple[Prefill, int]]) -> float:
        """Returns the seconds of one stage."""
        decodes, context = self._decodes(instance)
        shape = BatchShape(
            prefills=tuple((tokens, prefill.done) for prefill, tokens in packed),
            decodes=decodes,
            decode_context_tokens=context,
        )
        degrees = [prefill.degree(tokens) for prefill, tokens in packed]
        parts = [prefill.longest_part() for prefill, _ in packed]
        pass_s = filled_pass_s(self._operators, shape, parts, degrees)
        return self._per_stage(pass_s) * self._world.noise()

    def _per_stage(self, pass_s: float) -> float:
        overhead_s = self._operators.overhead_s
        return overhead_s + (pass_s - overhead_s) / self._stages

    def _iterated(self, what: tuple[MixedInstance, float]) -> None:
        """Notes that stage 1 has passed the iteration on."""
        instance, stage_s = what
        packed = instance.running
        if not instance.alive or packed is None:
            return
        instance.running = None
        if instance.batch.members:
            instance.batch.advance(1.0 / self._stages)
            self._finish_ended(instance)
        for prefill, tokens in packed:
            self._tally.prefill_tokens += tokens
            if instance.prefills.get(prefill.job.id) is prefill:
                self._chunk_done(instance, prefill, tokens, stage_s)
        instance.batch.restart(self._clock.now_s)
        self.changed[instance] = None

    def _chunk_done(
        self, instance: MixedInstance, prefill: Prefill, tokens: int, stage_s: float
    ) -> None:
        job, request = prefill.job, prefill.request
        prefill.done += tokens
        self._tally.chunks += 1
        job.chunks += 1
        if prefill.done < request.prompt_tokens:
            job.idle_since_s = self._clock.now_s
            share = self._alone_s(prefill.done) / self._alone_s(request.prompt_tokens)
            request.suspend(request.predicted_prefill_s * share)
            instance.order.started(request)
            return
        del instance.prefills[job.id]
        instance.order.computed(request, self._clock.now_s)
        instance.leaving[job.id] = prefill
        if self._stages == 1:
            self._prefilled((instance, prefill))
        else:
            known_s = self._clock.now_s + stage_s * (self._stages - 1)
            self._clock.at(known_s, self._prefilled, (instance, prefill))

    def _prefilled(self, what: tuple[MixedInstance, Prefill]) -> None:
        """Notes that the last stage has computed a prompt's last chunk: the first token is
        known."""
        instance, prefill = what
        job, now_s = prefill.job, self._clock.now_s
        if not instance.alive or instance.leaving.get(job.id) is not prefill:
            return
        del instance.leaving[job.id]
        job.first_token_s = now_s
        job.sp = 1
        assert job.first_start_s is not None  # it was computed
        if self._world.timeline is not None:
            self._world.timeline.block(
                instance.id, job.first_start_s, now_s, job.plan.index, "prefill"
            )
        compute_s = now_s - job.first_start_s - job.suspended_s
        self._world.report(
            instance.id,
            instance.generation,
            ChunkFinished(request_id=job.id, compute_s=compute_s, last=True),
        )
        if job.plan.output_tokens == 1:
            self._world.served(instance.id, instance.generation, job)
        else:
            self._sync(instance)
            instance.batch.join(job, now_s)
            self._world.report(instance.id, instance.generation, DecodeStarted(request_id=job.id))
        self.changed[instance] = None

    # ---- decodes alone

    def _sync(self, instance: MixedInstance) -> None:
        if instance.alone:
            self._tally.busy("mixed", instance.batch.sync(self._clock.now_s))

    def _step_s(self, batch: Batch, context: float) -> float:
        """The seconds between two tokens of a request: its share of the batch in all stages."""
        degree = batch.degree
        decodes = ceil_div(len(batch), self._stages)
        tokens = round(context * degree / self._stages)
        step_s = self._operators.decode_step_s(decodes, tokens, degree)
        return self._per_stage(step_s) * self._stages

    def _reached(self, what: tuple[MixedInstance, int]) -> None:
        instance, plans = what
        if not instance.alive or instance.plans != plans:
            return
        instance.alone = False
        self._tally.busy("mixed", instance.batch.sync_to_end(self._clock.now_s))
        self._finish_ended(instance)
        self.changed[instance] = None

    def _finish_ended(self, instance: MixedInstance) -> None:
        for sequence in instance.batch.leave_ended():
            self._world.left_batch(instance.id, sequence)
            self._world.served(instance.id, instance.generation, sequence.job)

    # ---- incarnations

    def join(self, instance_id: str, generation: int) -> None:
        self.instances[instance_id] = MixedInstance(instance_id, generation, self._policy)

    def leave(self, instance: MixedInstance) -> None:
        """Removes an instance that dies, with all it held."""
        self._sync(instance)
        instance.alive = False
        for request_id in list(instance.batch.members):
            self._world.left_batch(instance.id, instance.batch.leave(request_id))
        instance.prefills.clear()
        instance.leaving.clear()

    def is_idle(self, instance: MixedInstance) -> bool:
        """Returns whether it holds nothing, so that a draining instance may leave."""
        return not (instance.prefills or instance.leaving or instance.batch.members)

    def check_empty(self) -> None:
        """Raises IntegrityError when an instance holds anything."""
        for instance in self.instances.values():
            if instance.alive and (not self.is_idle(instance) or instance.running):
                raise IntegrityError(
                    f"{instance.id} still prefills {sorted(instance.prefills)} and decodes "
                    f"{sorted(instance.batch.members)}"
                )
