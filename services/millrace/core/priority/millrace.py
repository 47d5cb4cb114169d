"""Millrace's own order: the most requests that can all be in time, and a bounded wait.

1. In time. Requests are taken by deadline. A request is kept if all requests kept so far can still
   be done by then; if not, the kept request with the most work left is given up. The kept requests
   are the largest set that can be in time if nothing more arrives (Moore, "An n job, one machine
   sequencing algorithm for minimizing the number of late jobs", Management Science 15(1), 1968, on
   remaining work, since preemption makes finished work count). The set runs by deadline, which is
   optimal for a set that can be done in time.
2. Given up for now. The other requests use the remaining time, by deadline. A round later they may
   be in time after all: nothing is remembered.
3. Bounded wait. A request among the others that has waited `WAIT_BOUND` times its isolated prefill
   (at least `LEAST_S`) goes before all, the longest since arrival first. The bound holds as long as
   the work given up stays under `BACKLOG_S` seconds per instance. Beyond, the pool is overloaded:
   serving late requests first would make the others late too, and no request would gain.

Against FlowPrefill's S-EDF: S-EDF gives up a request only once it is too late for it alone, after
it has served the request (and delayed others) until then. Against Medha's LARS: relative slack
shares lateness evenly, which under load makes all requests late. Both leave the wait of requests
that they give up unbounded.

Work is counted as seconds times the instances of the group, and a pool is taken to do `SHARE` times
`instances` such seconds per second: members of a group wait for each other, a suspended request
waits for its own instance, and requests yet to come with earlier deadlines go before those present.
(Goodput in the simulator is flat from 0.6 to 0.8 on the Qwen mix, Tetris's and Mooncake's lengths,
and up to 2 % less at 0.5 and at 1; with one instance it does not depend on the share.)
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from operator import attrgetter

from millrace.core.live_request import LiveRequest

#: A wait beyond this many times the isolated prefill (at least LEAST_S) goes before everything.
WAIT_BOUND = 8.0
LEAST_S = 0.5
#: Seconds of given-up work per instance up to which the bound holds.
BACKLOG_S = 0.5
#: Share of a pool's instance-seconds that the requests present can count on.
SHARE = 0.7

_deadline = attrgetter("deadline_s", "order")

_PROMISED, _IN_TIME, _LATE = 0.0, 1.0, 2.0


def keys(requests: Sequence[LiveRequest], now_s: float, instances: int) -> list[tuple[float, ...]]:
    """Returns (class, deadline) of each request; in the first class (class, arrival)."""
    late = given_up(requests, now_s, instances)
    if not late:
        return [(_IN_TIME, request.deadline_s) for request in requests]
    backlog_s = sum(request.remaining_work_s(now_s) for request in late.values())
    promise = backlog_s <= BACKLOG_S * max(instances, 1)
    found: list[tuple[float, ...]] = []
    for request in requests:
        if request.id not in late:
            found.append((_IN_TIME, request.deadline_s))
        elif promise and overdue(request, now_s):
            found.append((_PROMISED, request.arrival_s))
        else:
            found.append((_LATE, request.deadline_s))
    return found


def given_up(
    requests: Sequence[LiveRequest], now_s: float, instances: int
) -> dict[str, LiveRequest]:
    """The ids of the requests that can't be in time if as many as possible are to be in time."""
    capacity = SHARE * max(instances, 1)
    late: dict[str, LiveRequest] = {}
    kept: list[tuple[float, int, LiveRequest]] = []  # a heap, most work first
    total_s = 0.0
    for request in sorted(requests, key=_deadline):
        left_s = request.remaining_s(now_s)
        if now_s + left_s > request.deadline_s:
            late[request.id] = request
            continue
        work_s = request.work_of(left_s)
        heapq.heappush(kept, (-work_s, request.order, request))
        total_s += work_s
        while len(kept) > 1 and now_s + total_s / capacity > request.deadline_s:
            most, _, dropped = heapq.heappop(kept)
            total_s += most
            late[dropped.id] = dropped
    return late


def overdue(request: LiveRequest, now_s: float) -> bool:
    """Returns whether the request has waited longer than the bound."""
    waited_s = now_s - request.arrival_s - request.executed_s
    if request.running_since_s is not None:
        waited_s -= now_s - request.running_since_s
    return waited_s > WAIT_BOUND * max(request.predicted_prefill_s, LEAST_S)
