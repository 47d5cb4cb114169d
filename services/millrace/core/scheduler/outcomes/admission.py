"""Decides whether a new request may wait in the queue at all.

1. Below the limits of the queue (`max_queue_requests`, and `max_queue_s` for each instance) every
   request is accepted.
2. At a limit, a request with an objective is accepted if it would be in time, and the limits hold
   for what would go before it: requests that were given up fill the queue, but don't delay it. So a
   full queue doesn't keep out what the instances could still serve in time. Requests that wait for
   room at decode end this: when they and later ones get it is not known.
3. At `MOST_FULL` times a limit no request is accepted, whatever objectives are stated. Of the
   limit in requests, those that instances have not computed yet count there, too.

A policy without such an order (`fcfs`) has all requests before a new one: there 2 accepts nothing.
An accepted request stays accepted. Those given up share what the order leaves them.
"""

from __future__ import annotations

from dataclasses import dataclass

from millrace.core.config import SchedulerConfig
from millrace.core.live_request import LiveRequest
from millrace.core.scheduler.fleet.cluster import Cluster
from millrace.core.scheduler.fleet.pool import Pool

#: The least Retry-After, in seconds: an answer of 0 would only bring the request back at once.
LEAST_RETRY_S = 1.0

#: The multiple of its limits that the queue never exceeds by another request.
MOST_FULL = 2


@dataclass(frozen=True, slots=True)
class Backlog:
    """The requests that no prefill instance has yet, and their predicted seconds of prefill."""

    queued: int
    queued_s: float
    decode_is_full: bool  # some of them wait for room at decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """Why a request is not accepted; the fields are those of `effects.Refuse`."""

    code: str
    message: str
    retry_after_s: float = 0.0


def refusal(
    request: LiveRequest,
    cluster: Cluster,
    backlog: Backlog,
    now_s: float,
    config: SchedulerConfig,
) -> Refusal | None:
    """Returns None when the request is accepted.

    A queue at its limit drains by one request in (mean work of a request) / (prefill instances)
    seconds. Retry-After is this time plus the time of the work beyond the limit.
    """
    pools = cluster.ready_pools()
    if not pools:
        return _unavailable(cluster, config)
    if not any(pool.could_serve(request) for pool in pools):
        return _too_large(request, pools)
    prefills = sum(pool.prefillers for pool in pools)
    queued, each_s = backlog.queued, backlog.queued_s / prefills
    if _has_room(queued, each_s, config):
        return None
    could = (_in_time(request, pool, now_s, config) for pool in pools)
    if not _is_full(pools, backlog, each_s, config) and any(could):
        return None
    beyond_s = max(each_s - config.max_queue_s, 0.0)
    return Refusal(
        code="overloaded",
        message=(
            f"{queued} requests wait, {each_s:.3g} s of work for each of {prefills} prefill "
            f"instances; the limits are {config.max_queue_requests} and {config.max_queue_s:g} s"
        ),
        retry_after_s=max(beyond_s + each_s / max(queued, 1), LEAST_RETRY_S),
    )


def _has_room(queued: float, each_s: float, config: SchedulerConfig) -> bool:
    return queued < config.max_queue_requests and each_s < config.max_queue_s


def _is_full(pools: list[Pool], backlog: Backlog, each_s: float, config: SchedulerConfig) -> bool:
    """Returns whether the queue takes no request at all. `each_s`: its work for each instance.

    The requests that instances have count: a more urgent one is sent at once, and they keep those
    that it suspends.
    """
    count = backlog.queued + sum(len(pool.run_queue.tasks) for pool in pools)
    return backlog.decode_is_full or not _has_room(count / MOST_FULL, each_s / MOST_FULL, config)


def _in_time(request: LiveRequest, pool: Pool, now_s: float, config: SchedulerConfig) -> bool:
    """Returns whether the request would be in time in the pool, after less work than the limits."""
    if request.allowed_ttft_s is None or not pool.prefill or not pool.could_serve(request):
        return False
    key = pool.ranking.key(request, now_s)
    before = pool.waiting.count_before_new(key, request.order)
    if before >= config.max_queue_requests:
        return False  # before their work is summed up
    before_s = pool.waiting.work_of_first_s(before)
    if before_s / len(pool.prefill) >= config.max_queue_s:
        return False
    return now_s + pool.ttft_after_s(request, key, before_s, now_s) <= request.deadline_s


def refused_for_now(
    refused: Refusal,
    request: LiveRequest,
    cluster: Cluster,
    now_s: float,
    config: SchedulerConfig,
) -> Refusal:
    """Returns a refusal that says "later" in place of one that says "too large", if the request may
    fit when the instances that are away have come back.
    """
    away = cluster.absences.at(now_s)
    if refused.code != "too_large" or not away:
        return refused
    cards = [card for card in away.values() if card is not None]
    if len(cards) == len(away):
        whole = Cluster(config)
        for card in [*(one.card for one in cluster.instances.values()), *cards]:
            whole.add(card)
        if not any(pool.could_serve(request) for pool in whole.ready_pools()):
            return refused
    return Refusal(
        code="unavailable",
        message=f"{', '.join(sorted(away))} may come back: {refused.message}",
        retry_after_s=config.lease_s,
    )


def _unavailable(cluster: Cluster, config: SchedulerConfig) -> Refusal:
    missing = [
        role
        for role, there in (
            ("prefill", any(pool.prefill for pool in cluster.pools.values())),
            ("decode", any(pool.decode for pool in cluster.pools.values())),
        )
        if not there
    ]
    message = (
        f"no {' and no '.join(missing)} instance takes new work"
        if missing
        else "no prefill instance serves the same model as a decode instance"
    )
    return Refusal(code="unavailable", message=message, retry_after_s=config.lease_s)


def _too_large(request: LiveRequest, pools: list[Pool]) -> Refusal:
    decodes = [one for pool in pools for one in pool.decode.values()]
    slots = max(one.card.kv_pages * one.page_tokens for one in decodes)
    context = max(one.card.max_context_tokens for one in decodes)
    spread = max(pool.kvp_placement.most_tokens() for pool in pools)
    notes = [f"the largest decode instance has room for {slots} tokens and a context of {context}"]
    if spread:
        notes.append(f"all instances together hold {spread} of one request")
    if spread and request.choices > 1:
        notes[1] += ", if it has one choice"
    return Refusal(
        code="too_large",
        message=(
            f"{request.prompt_tokens} prompt tokens and {request.choices} x "
            f"{request.max_new_tokens} new ones fit in no pair of instances; {'; '.join(notes)}"
        ),
    )
