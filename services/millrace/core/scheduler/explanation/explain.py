"""Says why a request waits, or waited: its part of the order, what is before it, what it lacks.

An explanation is made on demand from the scheduler's state, and reads all requests that go before
this one. Only the times by reason are kept while requests wait (`core.waits`), and the times of the
last requests that ended (`ended_requests`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from millrace.core.live_request import LiveRequest
from millrace.core.priority import PriorityKey, Ranking
from millrace.core.request import RequestState
from millrace.core.scheduler.explanation.advice import Help, Prompt, helps
from millrace.core.scheduler.fleet.pool import Pool
from millrace.core.scheduler.fleet.run_queue import RunQueue
from millrace.core.scheduler.fleet.task import Task
from millrace.core.scheduler.fleet.waiting_queue import WaitingQueue
from millrace.core.scheduler.outcomes.ended_requests import Ended, group_of
from millrace.core.scheduler.request_table import RequestTable

#: The most requests before it that an explanation names.
MOST_BEFORE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ahead:
    """The requests that go before it, of one part of the order, and their prefill in seconds."""

    part: str
    requests: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """One request that goes before it: its part of the order, its key in words, and its prefill in
    seconds."""

    request_id: str
    part: str
    key: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """How long it waited for one thing, while in one part of the order."""

    reason: str
    part: str
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a request waits, or waited. Of one that ended, only the times are known."""

    request_id: str
    state: str
    slo_class: str
    policy: str
    part: str = ""
    key: str = ""  # in words
    waits_for: str = ""
    left_s: float = 0.0  # predicted seconds of prefill
    deadline_in_s: float | None = None
    first_token_s: float | None = None  # after its arrival
    in_time: bool | None = None
    attainment: float | None = None  # of its class, 0 to 1
    value: float | None = None
    stretch: float | None = None
    ahead: tuple[Ahead, ...] = ()
    waited: tuple[Waited, ...] = ()
    suspended_by: tuple[str, ...] = ()
    before: tuple[Before, ...] = ()  # the first of them, at most `MOST_BEFORE`
    helps: tuple[Help, ...] = ()  # what would have helped, the most first


def explain(table: RequestTable, request_id: str, now_s: float) -> Explanation | None:
    """Returns None for a request that is not known, or no longer."""
    request = table.requests.get(request_id)
    if request is not None:
        return _of_live(table, request, now_s)
    ended = table.ended.get(request_id)
    return None if ended is None else _of_ended(table, ended)


def queue_place(table: RequestTable, request: LiveRequest) -> int | None:
    """Returns the request's place in its queue, from 1; None if it waits in none.

    A request that has no decode instance yet is counted among the requests without one. Requests
    at the prefill instances go before those that no instance has.
    """
    line = table.waiting_queue_of.get(request.id)
    if line is not None and line is table.unplaced:
        return line.count_before(request) + 1
    owner = table.cluster.instances.get(request.decode_id or "")
    if owner is None:
        return None
    if line is not None:
        rank = (line.key(request), request.order, 0)
        sharing = table.cluster.pool_of(owner).run_queue
        return line.count_before(request) + len(_heads_before(sharing, rank)) + 1
    run_queue = table.run_queue_of.get(request.id)
    if run_queue is None:
        return None
    task = run_queue.tasks[request.id][0]
    if task.started_s is not None:
        return None
    return len(_heads_before(run_queue, task.rank, task.mask)) + 1


def _of_ended(table: RequestTable, ended: Ended) -> Explanation:
    prompt = Prompt(tokens=ended.prompt_tokens, kept_tokens=ended.kept_tokens, group=ended.group)
    pool = _pool_at(table, ended.decode_id)
    return Explanation(
        request_id=ended.request_id,
        state=ended.state,
        slo_class=ended.slo_class,
        policy=table.cluster.policy.name,
        first_token_s=ended.first_token_s,
        in_time=ended.in_time,
        waited=_waited(ended.seconds),
        suspended_by=ended.suspended_by,
        helps=helps(ended.seconds, prompt, pool),
    )


def _of_live(table: RequestTable, request: LiveRequest, now_s: float) -> Explanation:
    first_s = request.first_token_s
    place = _place(table, request)
    ranking, key = (place.ranking, place.key) if place is not None else (None, None)
    part = "" if ranking is None or key is None else ranking.part(key)
    standing = None if ranking is None or key is None else ranking.describe(request, key, now_s)
    waits, kept = request.waits, request.kept_tokens
    prompt = Prompt(tokens=request.prompt_tokens, kept_tokens=kept, group=group_of(request))
    seconds = waits.until(now_s)
    return Explanation(
        request_id=request.id,
        state=request.state.value,
        slo_class=request.slo.class_name,
        policy=table.cluster.policy.name,
        part=part,
        key="" if standing is None else standing.key,
        waits_for=_waits_for(table, request, place),
        left_s=request.remaining_s(now_s) if first_s is None else 0.0,
        deadline_in_s=None if math.isinf(request.deadline_s) else request.deadline_s - now_s,
        first_token_s=None if first_s is None else first_s - request.arrival_s,
        in_time=request.in_time,
        attainment=None if standing is None else standing.attainment,
        value=None if standing is None else standing.value,
        stretch=None if standing is None else standing.stretch,
        ahead=() if place is None else _ahead(place, now_s),
        waited=_waited(seconds),
        suspended_by=waits.suspended_by,
        before=() if place is None else _before(place, now_s),
        helps=helps(seconds, prompt, _pool_at(table, request.decode_id)),
    )


def _waited(seconds: Mapping[tuple[str, str], float]) -> tuple[Waited, ...]:
    rows = sorted(seconds.items(), key=lambda row: -row[1])
    return tuple(Waited(reason=reason, part=part, seconds=s) for (reason, part), s in rows if s > 0)


# ---- where it stands


@dataclass(frozen=True, slots=True, kw_only=True)
class _Place:
    """Its place in an order: its key, and what goes before it with their keys."""

    ranking: Ranking
    key: PriorityKey
    before: list[tuple[LiveRequest, PriorityKey]]
    pool: Pool | None = None  # None: it has no decode instance yet
    task: Task | None = None  # the next to compute; None: no instance has it


def _place(table: RequestTable, request: LiveRequest) -> _Place | None:
    """Returns None where nothing of it is left to order."""
    line = table.waiting_queue_of.get(request.id)
    if line is not None and line is table.unplaced:
        key = line.key(request)
        before = [(one, line.key(one)) for one in line.before(request)]
        return _Place(ranking=line.ranking, key=key, before=before)
    run_queue = table.run_queue_of.get(request.id)
    pool = _pool_of(table, line, run_queue)
    if pool is None:
        return None
    if line is not None:
        key = line.key(request)
        before = [(one, line.key(one)) for one in line.before(request)]
        before += _heads_before(pool.run_queue, (key, request.order, 0))
        return _Place(ranking=pool.ranking, key=key, before=before, pool=pool)
    assert run_queue is not None
    task = run_queue.tasks[request.id][0]
    sharing = _heads_before(run_queue, task.rank, task.mask)
    return _Place(ranking=pool.ranking, key=task.rank[0], before=sharing, pool=pool, task=task)


def _pool_of(
    table: RequestTable, line: WaitingQueue | None, run_queue: RunQueue | None
) -> Pool | None:
    """Returns the pool in whose queue the request is; None where it is in none."""
    for pool in table.cluster.pools.values():
        if pool.waiting is line or pool.run_queue is run_queue:
            return pool
    return None


def _heads_before(
    run_queue: RunQueue, rank: tuple[PriorityKey, int, int], mask: int = -1
) -> list[tuple[LiveRequest, PriorityKey]]:
    """The requests whose tasks rank higher, on any of the instances of `mask`."""
    found: dict[str, tuple[LiveRequest, PriorityKey]] = {}
    for task in run_queue.ranked:
        if task.rank >= rank:
            break
        if task.mask & mask:
            head = task.requests[0]
            found[head.id] = (head, task.rank[0])
    return list(found.values())


def _ahead(place: _Place, now_s: float) -> tuple[Ahead, ...]:
    requests: dict[str, int] = {}
    seconds: dict[str, float] = {}
    for one, key in place.before:
        part = place.ranking.part(key)
        requests[part] = requests.get(part, 0) + 1
        seconds[part] = seconds.get(part, 0.0) + one.remaining_s(now_s)
    return tuple(
        Ahead(part=part, requests=count, seconds=seconds[part]) for part, count in requests.items()
    )


def _before(place: _Place, now_s: float) -> tuple[Before, ...]:
    ranking = place.ranking
    first = sorted(place.before, key=lambda row: (row[1], row[0].order))[:MOST_BEFORE]
    return tuple(
        Before(
            request_id=one.id,
            part=ranking.part(key),
            key=ranking.describe(one, key, now_s).key,
            seconds=one.remaining_s(now_s),
        )
        for one, key in first
    )


def _pool_at(table: RequestTable, instance_id: str | None) -> Pool | None:
    """Returns the pool of an instance, or the only one; None without prefill instances there."""
    instance = table.cluster.instances.get(instance_id or "")
    pools = list(table.cluster.pools.values())
    pool = table.cluster.pool_of(instance) if instance is not None else None
    if pool is None and len(pools) == 1:
        pool = pools[0]
    return pool if pool is not None and pool.prefill else None


# ---- what it lacks


def _waits_for(table: RequestTable, request: LiveRequest, place: _Place | None) -> str:
    if request.state is RequestState.TRANSFERRING:
        if request.decode_id is None:
            return "its result to be sent"
        return f"its KV to land at {request.decode_id}"
    if place is None or request.first_token_s is not None:
        return ""
    if place.pool is None:
        return _for_decode(table, request)
    if place.task is None:
        return _for_prefill(table, request, place.pool, place.key)
    return _for_turn(place.pool.run_queue, place.task)


def _for_decode(table: RequestTable, request: LiveRequest) -> str:
    if request.suspicion.is_held:
        lost = _listed(one.id for one in request.suspicion.losses)
        return f"{lost} to come back, or to be taken for dead"
    owners = [owner for pool in table.cluster.ready_pools() for owner in pool.kv_owners()]
    if not owners:
        return "an instance that decodes"
    if request.suspicion.is_isolated:
        return f"instances to itself: {len(request.suspicion.deaths)} died while it was open there"
    closed = table.closed_to_all()
    if not (open_to := [one for one in owners if one.id not in closed]):
        return _for_closed(one.id for one in owners)
    most = max(open_to, key=lambda one: one.open_pages)
    pages = most.booked_for(request)
    return (
        f"room at a decode instance: it needs {pages} pages, and {most.id} has most, "
        f"{most.open_pages}"
    )


def _for_prefill(table: RequestTable, request: LiveRequest, pool: Pool, key: PriorityKey) -> str:
    instances = list(pool.prefill.values())
    if not instances:
        return "an instance that prefills"
    closed = table.closed_to_all()
    instances = [one for one in instances if one.id not in closed]
    if not instances:
        return _for_closed(pool.prefill)
    rank = (key, request.order, 0)
    slots = table.config.tasks_ahead
    open_to = [one for one in instances if pool.run_queue.has_slot(one, rank, slots)]
    if not open_to:
        return f"a task slot: all {len(instances)} prefill instances have {slots} tasks before it"
    shares = pool.shares(request)
    least, degree = min(shares.values()), pool.least_sp(shares)
    able = [one for one in open_to if one.free_slots >= least and one.takes(request)]
    if len(able) < degree:
        group = f"a group of {degree} prefill instances" if degree > 1 else "a prefill instance"
        return f"pages at {group}: {len(able)} have the {least} tokens that it needs of each"
    return "requests before it, which keep pages for themselves, or a better group"


def _for_closed(names: Iterable[str]) -> str:
    return f"{_listed(names)} to be tried again, after errors or slow chunks"


def _for_turn(run_queue: RunQueue, task: Task) -> str:
    names = _listed(member.id for member in task.members)
    if task.started_s is not None:
        return f"nothing: it computes at {names}"
    if not task.ready:
        return "the chunk before, which is not finished"
    others = run_queue.instead_of(task)
    if task.chosen or not others:
        return f"{names} to begin it"
    return f"{names}, where {_listed(others)} run first"


def _listed(names: Iterable[str]) -> str:
    first, *rest = names
    shown = ", ".join([first, *rest[:3]])
    return f"{shown} and {len(rest) - 3} more" if len(rest) > 3 else shown
