"""Scheduling rounds: place requests at decode, send them to prefill, pick the tasks that run.

A round follows every arrival and every completion, and no other frequent event (FlowPrefill section
5.2, Alg. 2). It ranks all that waits, runs or is suspended by the policy and sends the best
requests to the instances. Where another task than the running one comes first, it orders a
preemption or a resumption."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice

from millrace.core.cost.correction import band_of
from millrace.core.kv.pages import pages_for, pages_of_plan
from millrace.core.live_request import LiveRequest
from millrace.core.request import Chunk, RequestState
from millrace.core.scheduler.dispatch.decode_placement import DecodePlacement
from millrace.core.scheduler.dispatch.tasks import tasks_of
from millrace.core.scheduler.fleet.batching import batch
from millrace.core.scheduler.fleet.instances import Instance, PrefillInstance
from millrace.core.scheduler.fleet.pool import Pool
from millrace.core.scheduler.fleet.task import Rank
from millrace.core.scheduler.planning.plan import Plan, PlannedChunk
from millrace.core.scheduler.request_table import RequestTable
from millrace.core.scheduler.step_context import StepContext

#: With preemption, later requests may pass this many requests at the head of the queue.
MAX_PASSED = 8

#: Queue time of an instance that has no room now: planners then use the others if they can.
NO_ROOM_S = 1e9

#: At most this many requests after the head are tried for a batch with it.
MAX_BATCHED = 64


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A plan as chunks of its request, with the pages that each instance of the plan needs."""

    chunks: tuple[Chunk, ...]
    pages: dict[str, int]
    plan: Plan
    queue_s: array[float]  # seconds until each instance of the pool is free for the request
    cached_tokens: int = 0  # of the first chunk, that its one instance has in its prefix cache


@dataclass(slots=True)
class _Round:
    """What the plans of one round of a pool share."""

    now_s: float
    kept: set[str] = field(default_factory=set)  # instances whose pages a passed request keeps
    #: Queue times by the number of tasks that go before, until a request is sent.
    queue_s: dict[int, array[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Planned:
    """A request's plan when it is sent, and the predicted seconds to its first token.

    `alternatives` computes what other groups would have taken: (instances, seconds).
    """

    request_id: str
    chunks: tuple[Chunk, ...]
    ttft_s: float
    alternatives: Callable[[], list[tuple[tuple[str, ...], float]]]


class Dispatcher:
    """Runs a round after every event that may have made room or brought work."""

    def __init__(self, table: RequestTable) -> None:
        self.count = 0
        self.commands = 0  # to prefill instances
        self.on_planned: Callable[[Planned], None] | None = None  # for traces
        self._table = table
        self._cluster = table.cluster
        self._config = table.config
        self._placement = DecodePlacement(table, self._send)

    def run(self, step: StepContext) -> None:
        """Places and dispatches all requests that have room now."""
        self.place(step)
        self.dispatch(step)

    def place(self, step: StepContext) -> None:
        """Runs the first half alone, for requests that must be placed before the next decision."""
        if self._table.unplaced:
            self._placement.place(step)

    def place_elsewhere(self, step: StepContext, instance: Instance) -> None:
        """Places requests again that wait for prefill at an instance that takes no new work.

        A request stays where no other instance has room for it now.
        """
        for request in list(self._cluster.pool_of(instance).waiting):
            waits = instance.id in request.kv_instance_ids and not request.continues
            queued = waits and request.state is RequestState.QUEUED
            if queued and self._placement.has_room(request, step.now_s):
                why = f"{instance.card.role} {instance.id} takes no new work"
                self._table.retry(step, request, why)
                self.place(step)  # it takes that room before the next request is tried

    def room_made(self, step: StepContext, instance: Instance) -> None:
        """Sends requests that waited for pages, after pages came free. The running tasks stay."""
        if self._table.unplaced:
            self.run(step)
        elif isinstance(instance, PrefillInstance):
            pool = self._cluster.pool_of(instance)
            if pool.lacks_pages:
                self._round(step, pool)

    def dispatch(self, step: StepContext) -> None:
        """Runs the second half alone, for events that made room at prefill instances only."""
        for pool in self._cluster.pools.values():
            if pool.waiting or pool.run_queue.ranked:
                self._round(step, pool)

    def _round(self, step: StepContext, pool: Pool) -> None:
        self.count += 1
        pool.rerank(step.now_s)
        self._dispatch(step, pool)
        orders = pool.run_queue.orders()
        self.commands += len(orders)
        step.order(orders)

    # ---- prefill

    def _dispatch(self, step: StepContext, pool: Pool) -> None:
        pool.lacks_pages = False
        this = _Round(step.now_s)
        index = 0
        while index < len(pool.waiting) and pool.prefill:
            request = pool.waiting[index]
            slots = self._slots(request, pool)
            if not any(slots):
                return  # nor is there one for a later request
            candidate = self._plan(request, pool, slots, this)
            if candidate is not None:
                self._start(step, request, candidate, pool)
                this.queue_s.clear()
            elif not pool.could_prefill(request):
                index += 1  # its instances still hold an earlier attempt
                pool.lacks_pages = True
            elif pool.run_queue.preemptive and index < MAX_PASSED:
                index += 1  # a later task yields to it, but does not give pages back
                closed = self._table.closed_to_all()
                this.kept.update(_waits_for(request, pool, this.kept | closed))
                if pool.prefill.keys() <= this.kept | closed:
                    return
            else:
                return  # later requests wait for it

    def _slots(self, request: LiveRequest, pool: Pool) -> list[bool]:
        """Returns which instances have a task slot among the tasks that go before the request."""
        rank: Rank = (pool.waiting.key(request), request.order, 0)
        has_slot, ahead = pool.run_queue.has_slot, self._config.tasks_ahead
        return [has_slot(one, rank, ahead) for one in pool.prefill.values()]

    def _plan(
        self, request: LiveRequest, pool: Pool, slots: list[bool], this: _Round
    ) -> _Candidate | None:
        """Returns chunks of which the first can be taken in now, or None; on no instance that is
        `kept`.

        A chunk can be taken in when its instances have a task slot, and all instances of the plan
        have the pages that they need. Where they lack pages, the plan is made again without these
        instances, and then for a larger group, whose members need fewer pages. A request whose plan
        is not taken in is planned again in the next round.
        """
        instances = list(pool.prefill.values())
        shares = pool.shares(request)
        kept = this.kept | self._table.closed_to(request)
        full = _full(request, instances, min(shares.values()), kept)
        if full:
            pool.lacks_pages = True
        if all(not has_slot or index in full for index, has_slot in enumerate(slots)):
            return None
        queue_s = self._queue_s(request, pool, instances, this)
        for index in full:
            queue_s[index] = NO_ROOM_S
        least_sp = pool.least_sp(shares)
        waiting_s = queue_s
        for attempt in range(3):
            found = self._possible(request, pool, queue_s, least_sp, shares)
            if found is None:
                return None
            members = found.plan.chunks[-1].members
            if all(
                queue_s[member] < NO_ROOM_S
                and found.pages[instances[member].id] <= instances[member].free_pages
                for member in members
            ):
                found = self._quickest(request, pool, queue_s, found)
                first = found.plan.chunks[0].members
                return found if all(slots[member] for member in first) else None
            if attempt == 1:
                queue_s, least_sp = waiting_s, len(members) + 1
                continue
            queue_s = queue_s[:]
            most = max(found.pages.values())
            for index, one in enumerate(instances):
                if one.free_pages < most:
                    queue_s[index] = NO_ROOM_S
                    pool.lacks_pages = True
        return None

    def _queue_s(
        self, request: LiveRequest, pool: Pool, instances: list[PrefillInstance], this: _Round
    ) -> array[float]:
        """Returns the seconds until each instance is free for the request."""
        rank: Rank = (pool.waiting.key(request), request.order, 0)
        before = pool.run_queue.count_before(rank)
        found = this.queue_s.get(before)
        if found is None:
            found = pool.run_queue.queue_s(instances, rank, this.now_s)
            this.queue_s[before] = found
        return found[:]

    def _quickest(
        self, request: LiveRequest, pool: Pool, queue_s: array[float], found: _Candidate
    ) -> _Candidate:
        """Returns `found`, or one chunk at an instance that has the prompt's first tokens and ends
        before.

        Only the tokens after them are computed, as a chunk with that history: C of Eq. (1).
        """
        if not request.prefix_hashes or request.kept_tokens or not request.resumable:
            return found
        for index, one in enumerate(pool.prefill.values()):
            cached = one.prefixes.tokens(request.prefix_hashes, request.prompt_tokens)
            if not cached or queue_s[index] >= NO_ROOM_S:
                continue
            alone_s = pool.predicted_s(request.prompt_tokens, cached, 1)
            if queue_s[index] + alone_s < found.plan.ttft_s:
                chunk = PlannedChunk(request.prompt_tokens, (index,))
                plan = Plan((chunk,), queue_s[index] + alone_s)
                candidate = _candidate(request, pool, plan, queue_s)
                if candidate.pages[one.id] <= one.free_pages:
                    found = replace(candidate, cached_tokens=cached)
        return found

    def _possible(
        self,
        request: LiveRequest,
        pool: Pool,
        queue_s: array[float],
        least_sp: int,
        shares: dict[int, int],
    ) -> _Candidate | None:
        """A plan that its members could take in once they are empty; None where there is none."""
        found = _candidate(request, pool, pool.plan(request, queue_s, least_sp), queue_s)
        if all(pages <= pool.prefill[i].card.kv_pages for i, pages in found.pages.items()):
            return found
        chunk = pool.one_chunk(request, queue_s, shares)
        return None if chunk is None else _candidate(request, pool, chunk, queue_s)

    def _start(
        self, step: StepContext, request: LiveRequest, candidate: _Candidate, pool: Pool
    ) -> None:
        """Sends the request, and the other requests of its batch."""
        key, chunks = pool.waiting.key(request), candidate.chunks
        together = self._batch(request, candidate, pool, step.now_s)
        tasks = tasks_of(
            self._cluster, pool, [request, *together], chunks, key, candidate.cached_tokens
        )
        self._table.start(pool, tasks)
        request.predict(
            sum(task.predicted_s for task in tasks),
            sum(task.predicted_s * len(task.members) for task in tasks),
        )
        ttft_s = candidate.plan.ttft_s
        if self.on_planned is not None:
            others = pool.alternatives(request, candidate.queue_s, NO_ROOM_S)
            self.on_planned(Planned(request.id, chunks, ttft_s, others))
        self._send(step, request, chunks, candidate.pages, ttft_s)
        for other in together:
            alone = Chunk(
                index=0,
                start_token=0,
                num_tokens=other.prompt_tokens,
                instance_ids=chunks[0].instance_ids,
            )
            card = pool.prefill[alone.instance_ids[0]].card
            self._send(step, other, (alone,), pages_of_plan((alone,), card.page_tokens, 0), ttft_s)

    def _batch(
        self, head: LiveRequest, candidate: _Candidate, pool: Pool, now_s: float
    ) -> list[LiveRequest]:
        """Returns the requests after `head` in the queue that are computed in one pass with it.

        Whole prompts on one instance only: a group's pass is laid out for one prompt.
        """
        budget, chunks = pool.batch_tokens, candidate.chunks
        if head.prompt_tokens >= budget or head.kept_tokens or candidate.cached_tokens:
            return []
        if len(chunks) > 1 or len(chunks[0].instance_ids) > 1 or head.suspicion.is_isolated:
            return []
        leader, latency = chunks[0].instance_ids[0], pool.latency
        if self._table.breakers.state(leader) != "closed":
            return []  # it gets one request, as a probe
        corrections, band = self._cluster.corrections, band_of(head.prompt_tokens)
        others = (r for r in pool.waiting if r is not head)
        after = (r for r in others if not r.kept_tokens and not r.suspicion.is_isolated)
        found = batch(
            head,
            islice(after, MAX_BATCHED),
            budget,
            now_s,
            lambda tokens: corrections.seconds(leader, band, latency.chunk_s(tokens, 0, 1)),
        )
        together: list[LiveRequest] = []
        instance = pool.prefill[leader]
        free = instance.free_pages - candidate.pages[instance.id]
        for one in found:
            if one is head:
                continue
            pages = pages_for(one.prompt_tokens, instance.card.page_tokens)
            if pages <= free and instance.takes(one):
                together.append(one)
                free -= pages
        return together

    def _send(
        self,
        step: StepContext,
        request: LiveRequest,
        chunks: tuple[Chunk, ...],
        pages: dict[str, int],
        ttft_s: float = 0.0,
    ) -> None:
        """`ttft_s`: the predicted seconds to the result, for a request that has no decode
        instance: its first instance emits the result.
        """
        request.send(chunks, step.now_s)
        if request.decode_id is None:
            step.place(request, chunks[0].instance_ids[0], ttft_s)
        for instance_id in chunks[-1].instance_ids:  # it holds all groups before it
            instance = self._cluster.instances[instance_id]
            if isinstance(instance, PrefillInstance):
                instance.hold(request, pages[instance_id])
            self.commands += 1
            step.run_prefill(request, instance_id)
        self._table.advance(step, request, RequestState.PREFILLING)


def _waits_for(request: LiveRequest, pool: Pool, kept: set[str]) -> list[str]:
    """Returns the instances whose pages the request keeps: the freest, where no group has the pages
    now. None that is `kept` from it.
    """
    others = [one for one in pool.prefill.values() if one.id not in kept]
    shares = pool.shares(request)
    least = min(shares.values())
    has_room = any(one.free_slots >= least and one.takes(request) for one in others)
    if has_room and not request.suspicion.is_isolated:
        return []
    others.sort(key=lambda one: (-one.free_pages, one.id))
    return [one.id for one in others[: pool.least_sp(shares)]]


def _full(
    request: LiveRequest, instances: list[PrefillInstance], least: int, kept: set[str]
) -> set[int]:
    """Returns the indices of the instances that have no room for a share of `least` slots now."""
    tokens, request_id = request.prompt_tokens, request.id
    return {
        index
        for index, one in enumerate(instances)
        # As `free_slots` and `takes`, written out: computed for every instance and plan.
        if (one.card.kv_pages - one.used_pages) * one.card.page_tokens < least
        or tokens > one.card.max_context_tokens
        or request_id in one.holdings
        or (kept and one.id in kept)
    }


def _candidate(request: LiveRequest, pool: Pool, plan: Plan, queue_s: array[float]) -> _Candidate:
    instances = list(pool.prefill.values())
    chunks = []
    start = request.kept_tokens
    for index, part in enumerate(plan.chunks):
        chunks.append(
            Chunk(
                index=index,
                start_token=start,
                num_tokens=part.num_tokens,
                instance_ids=tuple(instances[member].id for member in part.members),
            )
        )
        start += part.num_tokens
    card = instances[plan.chunks[0].members[0]].card
    pages = pages_of_plan(chunks, card.page_tokens, card.kv_layers)
    return _Candidate(tuple(chunks), pages, plan, queue_s)
