"""Places requests at a decode instance, the KV owner, and spreads long ones from there.

A prefill-only request needs no decode instance where instances of role prefill are: it waits for
those at once. Of a pool without any, a mixed instance takes it as any other request.

The best request in the queue is placed first. Of the instances that have the pages, those count
where the placement loses least (`placement_loss`). Of these it gets the freest (`fleet.freeness`),
or the instance that has most of the prompt in its prefix cache, if that saves much of the prefill.
A request that no single instance may or can hold is spread over several
(`fleet.kvp_placement`)."""

from __future__ import annotations

from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

from millrace.core.live_request import LiveRequest
from millrace.core.request import MIN_KEPT_TOKENS, Chunk, Shard
from millrace.core.scheduler.dispatch.placement_loss import PlacementLoss
from millrace.core.scheduler.fleet.freeness import freest
from millrace.core.scheduler.fleet.instances import DecodeInstance, PrefillInstance
from millrace.core.scheduler.fleet.pool import Pool
from millrace.core.scheduler.request_table import RequestTable
from millrace.core.scheduler.step_context import StepContext

#: This many requests at the head may wait for decode instances' pages while later ones go ahead.
#: Each reserves the pages of one instance until it fits (of all its instances, if it is to be
#: spread), so smaller requests pass it on other instances only. A large request is never starved,
#: and does not stop the whole fleet either.
MAX_WAITING = 4

#: A prefix cache decides where a request is placed if it saves at least this share of the prefill.
LEAST_SAVING = 0.1

#: Sends a placed request its chunks, with the pages that they take at prefill instances.
Send = Callable[[StepContext, LiveRequest, tuple[Chunk, ...], dict[str, int]], None]


class _Fitting(NamedTuple):
    """Where a request fits once the instances are empty: at one of `owners`, or over a pool of
    `spread`.
    """

    owners: list[DecodeInstance]
    spread: list[Pool]


class _Spot(NamedTuple):
    """Where a request has room now."""

    owner: DecodeInstance
    shards: tuple[Shard, ...] = ()
    kept_tokens: int = 0  # that the KV owner takes out of its prefix cache


class DecodePlacement:
    """Places the requests of the queue `unplaced`."""

    def __init__(self, table: RequestTable, send: Send) -> None:
        self._table = table
        self._cluster = table.cluster
        self._send = send
        self._loss = PlacementLoss(table)

    def place(self, step: StepContext) -> None:
        """Places all requests that have room now."""
        unplaced = self._table.unplaced
        self._table.rerank_unplaced(step.now_s)
        pools = self._cluster.ready_pools()
        reserved: set[str] = set()
        index = waiting = 0
        while pools and index < len(unplaced) and waiting < MAX_WAITING:
            request = unplaced[index]
            if self._table.must_wait(request):
                index += 1
                continue
            if request.prefill_only and (prefillers := _prefillers(request, pools)):
                self._place_prefill_only(step, request, prefillers)
                continue
            fitting = _fitting(request, pools)
            closed = self._table.closed_to(request)
            spot = self._spot(request, fitting, reserved | closed, step.now_s)
            if spot is not None:
                self._place(step, request, spot)
                continue
            closed = self._table.closed_to_all()  # to later requests, too
            reserved.update(_kept(request, fitting, reserved | closed))
            # What fits nowhere (its instance died, or still holds an earlier attempt) blocks none.
            fits = any(owner.could_hold(request) for owner in fitting.owners)
            waiting += fits or bool(fitting.spread)
            index += 1

    def has_room(self, request: LiveRequest, now_s: float) -> bool:
        """Returns whether the request has room anywhere now."""
        pools = self._cluster.ready_pools()
        if request.prefill_only and _prefillers(request, pools):
            return True
        fitting = _fitting(request, pools)
        return self._spot(request, fitting, self._table.closed_to(request), now_s) is not None

    def _spot(
        self, request: LiveRequest, fitting: _Fitting, reserved: Collection[str], now_s: float
    ) -> _Spot | None:
        owners = fitting.owners
        if reserved:
            owners = [one for one in owners if one.id not in reserved]

        def able(one: DecodeInstance) -> bool:
            return one.could_hold(request) and one.has_pages(request)

        owners = self._of_least_loss(request, owners, able, now_s)
        if request.prefix_hashes and not request.attempt:
            spot = self._keeper(request, owners, able)
        else:
            owner = freest(owners, able)
            spot = None if owner is None else _Spot(owner)
        if spot is not None:
            return spot
        for pool in fitting.spread:
            shards = pool.kvp_placement.find(request, pool.kv_owners(), reserved)
            if shards:
                return _Spot(pool.decode[shards[0].worker_id], shards)
        return None

    def _of_least_loss(
        self,
        request: LiveRequest,
        owners: list[DecodeInstance],
        able: Callable[[DecodeInstance], bool],
        now_s: float,
    ) -> list[DecodeInstance]:
        """Returns the instances where a placement loses least; all, where none loses anything."""
        if not owners:
            return owners
        if request.slo.e2e_s is not None:
            pool = self._cluster.pool_of(owners[0])
            request.expect_first_token(now_s + pool.predicted_ttft_s(request, now_s))
        if not self._loss.matters(request, owners):
            return owners

        ttft_s = partial(self._ttft_s, request, now_s=now_s)
        return self._loss.least(request, [one for one in owners if able(one)], now_s, ttft_s)

    def _ttft_s(self, request: LiveRequest, owner: DecodeInstance, now_s: float) -> float:
        """The seconds to the first token on the way over the instance."""
        pool = self._cluster.pool_of(owner)
        if owner.card.role == "mixed" and pool.prefill:
            return self._at_mixed_s(request, owner, now_s)
        return pool.predicted_ttft_s(request, now_s)

    def _at_mixed_s(self, request: LiveRequest, owner: DecodeInstance, now_s: float) -> float:
        """The seconds to the first token at a mixed instance: the prompts there that the policy
        ranks before it, and its own.
        """
        own_s, backlog_s = owner.prefill_s(request), owner.backlog_s(now_s)
        if not backlog_s:
            return own_s
        queued = (self._table.requests.get(name) for name in owner.holdings)
        waiting = [one for one in queued if one is not None and one.first_token_s is None]
        ranking = self._cluster.pool_of(owner).ranking
        rank = ranking.key(request, now_s), request.order
        ahead_s = sum(
            one.predicted_prefill_s
            for one in waiting
            if (ranking.key(one, now_s), one.order) < rank
        )
        all_s = sum(one.predicted_prefill_s for one in waiting)
        return own_s + (backlog_s * ahead_s / all_s if all_s > 0.0 else 0.0)

    def _keeper(
        self,
        request: LiveRequest,
        owners: list[DecodeInstance],
        able: Callable[[DecodeInstance], bool],
    ) -> _Spot | None:
        """The instance whose prefix cache saves most, or the freest where none saves much."""
        best = owner = freest(owners, able)
        if best is None or owner is None:
            return None
        if request.choices > 1 or not request.resumable:  # nothing is kept for such
            return _Spot(owner)
        kept = self._kept_tokens(request, owners, able)
        most, at_owner = max(kept.values(), default=0), kept.get(owner.id, 0)
        if most > at_owner:
            best = freest(one for one in owners if kept.get(one.id) == most) or owner
            pool = self._cluster.pool_of(best)
            saved_s = pool.rest_s(request, at_owner) - pool.rest_s(request, most)
            if saved_s < LEAST_SAVING * pool.rest_s(request, 0):
                best = owner
        return _Spot(best, kept_tokens=kept.get(best.id, 0))

    def _kept_tokens(
        self,
        request: LiveRequest,
        owners: list[DecodeInstance],
        able: Callable[[DecodeInstance], bool],
    ) -> dict[str, int]:
        """Returns, by able instance, the cached tokens worth keeping: more than prefill's caches
        have.

        A plain decode instance would have to send its own tokens to prefill first. Instances
        without tokens worth keeping have no entry."""
        hashes, length = request.prefix_hashes, request.prompt_tokens
        at_prefill: dict[str, int] = {}  # by model, most
        kept: dict[str, int] = {}
        for one in owners:
            tokens = one.prefixes.tokens(hashes, length)
            full = one.sequences >= one.card.max_batch
            if tokens < MIN_KEPT_TOKENS or full or not able(one):
                continue
            if one.card.role == "mixed":
                kept[one.id] = tokens
                continue
            model = one.card.model_hash
            if model not in at_prefill:
                prefills = self._cluster.pool_of(one).prefill.values()
                found = (other.prefixes.tokens(hashes, length) for other in prefills)
                at_prefill[model] = max(found, default=0)
            if tokens > at_prefill[model]:
                kept[one.id] = tokens
        return kept

    def _place(self, step: StepContext, request: LiveRequest, spot: _Spot) -> None:
        table, owner = self._table, spot.owner
        pool = self._cluster.pool_of(owner)
        table.unqueue(request)
        self._hold(request, spot)
        request.place(owner.id, spot.shards, spot.kept_tokens)
        if request.attempt > 1 or spot.kept_tokens or len(self._cluster.pools) > 1:
            pool.predict(request)  # by the pool of its instance: it may be another pool now
        step.place(request, owner.id, self._ttft_s(request, owner, step.now_s))
        step.admit(request)
        step.record(request)
        if owner.card.role != "mixed":
            table.enqueue(step, request, pool.waiting)
        else:
            kept = spot.kept_tokens
            owner.prefills(request, step.now_s)
            whole = Chunk(
                index=0,
                start_token=kept,
                num_tokens=request.prompt_tokens - kept,
                instance_ids=(owner.id,),
            )
            self._send(step, request, (whole,), {})

    def _place_prefill_only(
        self, step: StepContext, request: LiveRequest, pools: list[Pool]
    ) -> None:
        """Lets a request that generates nothing wait for prefill, in the quickest of the pools."""

        def ttft_s(pool: Pool) -> float:
            return pool.predicted_ttft_s(request, step.now_s)

        pool = min(pools, key=ttft_s) if len(pools) > 1 else pools[0]
        self._table.unqueue(request)
        request.place(None)
        if request.attempt > 1 or len(self._cluster.pools) > 1:
            pool.predict(request)
        if request.attempt == request.earlier_attempts + 1:
            step.record(request)  # a later attempt is recorded when the one before it is over
        self._table.enqueue(step, request, pool.waiting)

    def _hold(self, request: LiveRequest, spot: _Spot) -> None:
        spot.owner.hold(request, *spot.shards[:1])
        for shard in spot.shards[1:]:
            holder = self._cluster.instances[shard.worker_id]
            assert not isinstance(holder, PrefillInstance)  # those hold no shards
            holder.hold_shard(request.id, shard)


def _prefillers(request: LiveRequest, pools: list[Pool]) -> list[Pool]:
    """Returns the pools whose prefill instances could take the request."""
    return [pool for pool in pools if pool.prefill and pool.could_prefill(request)]


def _fitting(request: LiveRequest, pools: list[Pool]) -> _Fitting:
    found: list[DecodeInstance] = []
    spread: list[Pool] = []
    for pool in pools:
        if not pool.could_prefill(request):
            continue
        owners = pool.kv_owners()
        if not pool.kvp_placement.wanted(request, owners):
            found += owners
        elif pool.kvp_placement.could_hold(request, owners):
            spread.append(pool)
    return _Fitting(found, spread)


def _kept(request: LiveRequest, fitting: _Fitting, reserved: Collection[str]) -> tuple[str, ...]:
    """Returns the instances whose pages the request keeps to itself while it waits."""
    open_to = (one for one in fitting.owners if one.id not in reserved)
    free = [one for one in open_to if one.could_hold(request)]
    if free:
        return (max(free, key=lambda one: (one.open_pages, one.id)).id,)
    for pool in fitting.spread:
        if kept := pool.kvp_placement.kept(request, pool.kv_owners(), reserved):
            return kept
    return ()
