"""Goes on with a request that another scheduler has placed, from what instances hold of it.

What the instances hold says how far the request is. The request goes on from there: it waits, is
computed or decodes as before. What can't go on is treated as after the loss of an instance: the
tokens whose KV has landed are kept, or the request begins again. If its client has tokens already,
its proxy migrates it.
"""

from __future__ import annotations

from collections.abc import Mapping

from millrace.core.incarnation import Incarnation
from millrace.core.kv.pages import pages_of_plan
from millrace.core.live_request import LiveRequest
from millrace.core.request import Request, RequestState
from millrace.core.scheduler.dispatch.tasks import tasks_of
from millrace.core.scheduler.events import Reopened
from millrace.core.scheduler.fleet.instances import (
    DecodeInstance,
    Instance,
    KvpInstance,
    PrefillInstance,
)
from millrace.core.scheduler.fleet.pool import Pool
from millrace.core.scheduler.held import Held
from millrace.core.scheduler.request_table import RequestTable
from millrace.core.scheduler.step_context import StepContext

_WHY = "the scheduler has changed and its work could not go on"


class Adoption:
    """Adopts requests, which the table has as new and unplaced."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._cluster = table.cluster

    def adopt(
        self, step: StepContext, request: LiveRequest, event: Reopened, held: Mapping[str, Held]
    ) -> None:
        """Adopts a request. `held`: its part at each instance, by instance id."""
        if event.token_age_s is not None:
            request.has_token_since(step.now_s - event.token_age_s)
        request.count_attempts(max(event.attempts, _last_attempt(held)))
        owner = self._owner(held)
        if owner and event.token_age_s is not None and event.decode != _incarnation(owner):
            owner = None  # it began again, elsewhere than where the client's tokens come from
        leader = self._leader(held, owner)
        used = set() if owner is None else {owner.id}
        if leader is not None:
            used.update(leader.chunks[-1].instance_ids)
        for instance_id, part in held.items():
            if instance_id not in used or part.leaving:
                self.let_go(step, instance_id, part)
        if owner is not None:
            self._place(step, request, event, owner, held, leader)
        elif request.prefill_only and leader is not None and not leader.complete:
            self._place_prefill_only(step, request, event, held, leader)
        elif event.token_age_s is not None:
            self._table.fail(step, request, f"{_WHY} after the first token", resumable=True)

    def let_go(self, step: StepContext, instance_id: str, part: Held) -> None:
        """Has the instance drop its part; until then its pages are taken."""
        instance = self._cluster.instances[instance_id]
        stand_in = _unknown(part)
        if part.complete:
            return
        if isinstance(instance, PrefillInstance):
            self._hold_prompt(instance, stand_in, part)
        elif isinstance(instance, DecodeInstance):
            instance.hold(stand_in, *part.shards[:1])
        else:
            return  # a KVP worker reports no parts
        self._table.let_go(step, part.request_id, instance, None if part.leaving else _WHY)

    # ---- what the parts amount to

    def _owner(self, held: Mapping[str, Held]) -> DecodeInstance | None:
        """Returns the KV owner of the last attempt, with all its KVP workers; None without one."""
        found: DecodeInstance | None = None
        for instance_id, part in held.items():
            instance = self._cluster.instances[instance_id]
            if not isinstance(instance, DecodeInstance) or part.leaving:
                continue
            shards = [self._cluster.instances.get(one.worker_id) for one in part.shards[1:]]
            if all(isinstance(one, KvpInstance | DecodeInstance) for one in shards) and (
                found is None or part.attempt > held[found.id].attempt
            ):
                found = instance
        return found

    def _leader(self, held: Mapping[str, Held], owner: DecodeInstance | None) -> Held | None:
        """Returns the part of the leader of the SP group that computes the owner's attempt.

        None where no group does, or where an instance of it is missing: a member that has done its
        part remembers it.
        """
        for instance_id, part in held.items():
            if not part.chunks or part.leaving or part.chunks[-1].instance_ids[0] != instance_id:
                continue
            if owner is None:
                fits = part.decode is None
            elif instance_id == owner.id:  # a mixed instance
                return part
            else:
                here = Incarnation(owner.id, owner.card.generation)
                own = held[owner.id]
                fits = part.decode == here and part.attempt == own.attempt and not own.failed
            members = [self._cluster.instances.get(i) for i in part.chunks[-1].instance_ids]
            parts = [held.get(i) for i in part.chunks[-1].instance_ids]
            there = all(isinstance(one, PrefillInstance) for one in members)
            if fits and there and all(_is_of(one, part.attempt) for one in parts):
                return part
        return None

    # ---- placing

    def _place(
        self,
        step: StepContext,
        request: LiveRequest,
        event: Reopened,
        owner: DecodeInstance,
        held: Mapping[str, Held],
        leader: Held | None,
    ) -> None:
        own = held[owner.id]
        pool = self._cluster.pool_of(owner)
        self._adopt_place(step, request, owner.id, own, pool)
        owner.hold(request, *request.shards[:1])
        for shard in request.shards[1:]:
            holder = self._cluster.instances[shard.worker_id]
            assert isinstance(holder, KvpInstance | DecodeInstance)  # as `_owner` has found
            holder.hold_shard(request.id, shard, is_adopted=True)
        request.land(max(own.landed_tokens, own.kept_tokens))
        has_token = event.token_age_s is not None
        if own.first_token or (leader and (has_token or leader.complete)):
            self._transfers(step, request, held, leader)
            if own.decoding:
                self._decodes(step, request, owner)
        elif leader is not None:
            self._compute(step, request, pool, held, leader)
        elif has_token:  # of an earlier attempt here: nobody computes this one
            self._table.fail(step, request, f"{_WHY} after the first token", resumable=True)
        else:
            request.count_attempts(request.earlier_attempts)  # not from the adopted one on
            self._table.take_back(step, request, _WHY)
        if request.decode_id == owner.id and event.decode != _incarnation(owner):
            step.place(request, owner.id, request.predicted_prefill_s)

    def _place_prefill_only(
        self,
        step: StepContext,
        request: LiveRequest,
        event: Reopened,
        held: Mapping[str, Held],
        leader: Held,
    ) -> None:
        first = self._cluster.instances[leader.chunks[0].instance_ids[0]]
        pool = self._cluster.pool_of(first)
        self._adopt_place(step, request, None, leader, pool)
        self._compute(step, request, pool, held, leader)
        if event.decode != _incarnation(first):
            step.place(request, first.id, request.predicted_prefill_s)

    def _adopt_place(
        self, step: StepContext, request: LiveRequest, owner_id: str | None, part: Held, pool: Pool
    ) -> None:
        """Moves the request from the unplaced ones to those that wait for prefill."""
        self._table.unqueue(request)
        request.adopt(owner_id, part.shards, attempt=part.attempt, kept_tokens=part.kept_tokens)
        if pool.prefillers:
            pool.predict(request)
        self._table.enqueue(step, request, pool.waiting)

    # ---- going on

    def _transfers(
        self, step: StepContext, request: LiveRequest, held: Mapping[str, Held], leader: Held | None
    ) -> None:
        """Goes on with a request that has its first token. Prefill may still hold its prompt."""
        self._table.unqueue(request)
        if leader is not None:
            self._hold_chunks(step, request, held, leader)
        self._table.advance(step, request, RequestState.PREFILLING)
        self._table.computed(step, request)

    def _decodes(self, step: StepContext, request: LiveRequest, owner: DecodeInstance) -> None:
        """Goes on with a request in the batch."""
        owner.start(request.id)
        since_s = request.first_token_s
        request.start_decode(step.now_s if since_s is None else since_s)
        owner.keep_pace(request)
        self._table.advance(step, request, RequestState.DECODING)

    def _compute(
        self,
        step: StepContext,
        request: LiveRequest,
        pool: Pool,
        held: Mapping[str, Held],
        leader: Held,
    ) -> None:
        """Goes on with a request whose chunks instances compute, or have just computed."""
        key = pool.waiting.key(request)
        owner = self._cluster.instances.get(request.decode_id or "")
        todo = leader.chunks[leader.chunks_done :]
        if isinstance(owner, DecodeInstance) and owner.card.role == "mixed":
            todo = ()
            owner.prefills(request, step.now_s)
        tasks = tasks_of(self._cluster, pool, [request], todo, key) if todo else []
        for task in tasks:
            task.batched = True  # it may be, and what its members say of its time is then no lesson
        if tasks:
            self._table.start(pool, tasks)
            for task in tasks:
                pool.run_queue.adopted(task)
            work_s = sum(task.predicted_s * len(task.members) for task in tasks)
            request.predict(sum(task.predicted_s for task in tasks), work_s)
        else:
            self._table.unqueue(request)
        self._hold_chunks(step, request, held, leader)
        self._table.advance(step, request, RequestState.PREFILLING)
        if leader.chunks_done:
            request.finish_chunk(leader.chunks_done - 1, 0.0)
        if leader.chunks_done == len(leader.chunks):
            self._table.computed(step, request)
        for instance_id in leader.chunks[-1].instance_ids:
            member = self._cluster.instances[instance_id]
            if tasks and held[instance_id].complete:
                self._table.did_part(request, member)
        if tasks and leader.computing:
            pool.run_queue.suspended(tasks[0], leader.compute_s)
            pool.run_queue.goes_on(tasks[0], step.now_s)
            request.start_chunk(step.now_s)

    def _hold_chunks(
        self, step: StepContext, request: LiveRequest, held: Mapping[str, Held], leader: Held
    ) -> None:
        request.send(leader.chunks, step.now_s)
        for instance_id in leader.chunks[-1].instance_ids:
            member = self._cluster.instances[instance_id]
            here = held.get(instance_id)
            if isinstance(member, PrefillInstance) and here is not None and not here.complete:
                self._hold_prompt(member, request, leader)

    def _hold_prompt(self, instance: PrefillInstance, request: LiveRequest, part: Held) -> None:
        card = instance.card
        pages = pages_of_plan(part.chunks, card.page_tokens, card.kv_layers)
        instance.hold(request, pages[instance.id])


def _is_of(part: Held | None, attempt: int) -> bool:
    return part is not None and part.attempt == attempt and not part.leaving


def _last_attempt(held: Mapping[str, Held]) -> int:
    return max((part.attempt for part in held.values()), default=0)


def _incarnation(instance: Instance) -> Incarnation:
    return Incarnation(instance.id, instance.card.generation)


def _unknown(part: Held) -> LiveRequest:
    """Returns a request of the part's size, for the pages that an instance still holds for it."""

    return LiveRequest(
        Request(
            id=part.request_id,
            proxy_id="",
            prompt_tokens=part.prompt_tokens,
            max_new_tokens=part.max_new_tokens,
            choices=part.choices,
        )
    )
