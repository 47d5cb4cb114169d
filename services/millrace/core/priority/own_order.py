"""The order of a tenant's own requests: a request may take the place of another of its tenant.

Clients state priorities as in vLLM: the smaller number goes first, 0 is usual. A priority never
moves a request before requests of others. It only exchanges the places of two requests of one
tenant and one class, under any policy. The request that moves forward must not be larger than the
request that makes room, neither in work left nor in tokens of KV. So nobody else waits longer: what
goes before a request of others is no more work than without priorities.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import nsmallest

from millrace.core.live_request import LiveRequest
from millrace.core.priority.ranking import Policy, PriorityKey, RankDetails, Ranking

#: Requests of a tenant's class that may exchange their places, the first ones of the order.
MOST = 64

_Group = dict[str, LiveRequest]


def ranking_of(policy: Policy) -> Ranking:
    """Returns a ranking of the policy, with the tenants' own orders within it."""
    return OwnOrder(policy.ranking())


class OwnOrder:
    """A ranking whose places are those of `policy`, exchanged by the requests' priorities."""

    def __init__(self, policy: Ranking) -> None:
        self._policy = policy
        self._groups: dict[tuple[str, str], _Group] = {}
        self._stated: dict[tuple[str, str], int] = {}  # requests with a priority other than 0
        self._places: dict[str, PriorityKey] = {}  # the policy's keys
        self._taken: dict[tuple[str, str], dict[str, PriorityKey]] = {}  # places of others

    def add(self, request: LiveRequest, now_s: float) -> PriorityKey:
        return self._join(request, self._policy.add(request, now_s))

    def remove(self, request: LiveRequest) -> None:
        self._leave(request)
        self._policy.remove(request)

    def replace(self, old: LiveRequest, new: LiveRequest) -> PriorityKey:
        self._leave(old)
        return self._join(new, self._policy.replace(old, new))

    def update(self, now_s: float, instances: int) -> Mapping[str, PriorityKey]:
        changed = self._policy.update(now_s, instances)
        self._places.update(changed)
        if not self._stated and not self._taken:
            return changed
        found = dict(changed)
        for name in {**self._stated, **self._taken}:
            before = self._taken.pop(name, {})
            after = self._exchanged(name, now_s)
            if after:
                self._taken[name] = after
            found |= {one: self._places[one] for one in before if one in self._places} | after
        return found

    def key(self, request: LiveRequest, now_s: float) -> PriorityKey:
        return self._policy.key(request, now_s)

    def part(self, key: PriorityKey) -> str:
        return self._policy.part(key)

    def describe(self, request: LiveRequest, key: PriorityKey, now_s: float) -> RankDetails:
        place = self._places.get(request.id, key)  # its own, whichever place it has taken
        return self._policy.describe(request, place, now_s)

    def _join(self, request: LiveRequest, key: PriorityKey) -> PriorityKey:
        name = _group_of(request)
        self._groups.setdefault(name, {})[request.id] = request
        self._places[request.id] = key
        if request.priority:
            self._stated[name] = self._stated.get(name, 0) + 1
        return key

    def _leave(self, request: LiveRequest) -> None:
        name = _group_of(request)
        group = self._groups[name]
        del group[request.id], self._places[request.id]
        if not group:
            del self._groups[name]
        if request.priority:
            self._stated[name] -= 1
            if not self._stated[name]:
                del self._stated[name]

    def _exchanged(self, name: tuple[str, str], now_s: float) -> dict[str, PriorityKey]:
        """Returns the places that requests of a group take from others, by request id."""
        if name not in self._stated:
            return {}
        places = self._places
        group = self._groups[name].values()
        ordered = nsmallest(MOST, group, key=lambda one: (places[one.id], one.order))
        keys = [places[one.id] for one in ordered]
        sizes = {one.id: _size(one, now_s) for one in ordered}
        for index, first in enumerate(ordered):
            room = sizes[first.id]
            best, where = first.priority, index
            for later in range(index + 1, len(ordered)):
                one = ordered[later]
                if one.priority < best and _fits(sizes[one.id], room):
                    best, where = one.priority, later
            ordered[index], ordered[where] = ordered[where], first
        # After others with the same key, whose order of submission may differ from the owner's.
        return {
            one.id: (*key, float(one.order))
            for one, key in zip(ordered, keys, strict=True)
            if places[one.id] != key
        }


def _group_of(request: LiveRequest) -> tuple[str, str]:
    return request.tenant, request.slo.class_name


def _size(request: LiveRequest, now_s: float) -> tuple[float, int]:
    """Returns the work left, in seconds times instances, and the most tokens of its KV."""
    tokens = request.prompt_tokens + request.choices * request.max_new_tokens
    return request.remaining_work_s(now_s), tokens


def _fits(size: tuple[float, int], room: tuple[float, int]) -> bool:
    return size[0] <= room[0] and size[1] <= room[1]
