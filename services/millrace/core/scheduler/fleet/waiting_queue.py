"""A queue in a policy's order, with the predicted seconds of the work in it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

from millrace.core.live_request import LiveRequest
from millrace.core.priority import PriorityKey, Ranking

_Rank = tuple[PriorityKey, int]
_Entry = tuple[PriorityKey, int, LiveRequest]

#: More new keys than one in so many requests are sorted in, fewer are moved one by one.
_SORTS_FROM = 8


class WaitingQueue:
    """Requests by (key, order of submission). Adding and removing cost O(log n) comparisons."""

    def __init__(self, ranking: Ranking) -> None:
        self.ranking = ranking
        self._entries: list[_Entry] = []
        self._ranks: dict[str, _Rank] = {}
        self.work_s = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._ranks

    def __iter__(self) -> Iterator[LiveRequest]:
        """Yields requests in order. The queue must not change meanwhile."""
        return (entry[2] for entry in self._entries)

    def __getitem__(self, index: int) -> LiveRequest:
        return self._entries[index][2]

    def add(self, request: LiveRequest, now_s: float) -> None:
        self._insert(request, self.ranking.add(request, now_s))
        self.work_s += request.predicted_prefill_s

    def remove(self, request: LiveRequest) -> None:
        """Raises KeyError when the request is not in the queue."""
        self.send(request)
        self.ranking.remove(request)

    def send(self, request: LiveRequest) -> None:
        """Removes a request that stays in the ranking, for the run queue of the pool."""
        self._take_out(request.id)
        # An empty queue has no work: rounding errors don't outlive it.
        self.work_s = self.work_s - request.predicted_prefill_s if self._entries else 0.0

    def _insert(self, request: LiveRequest, key: PriorityKey) -> None:
        self._ranks[request.id] = (key, request.order)
        insort(self._entries, (key, request.order, request))

    def _take_out(self, request_id: str) -> LiveRequest:
        return self._entries.pop(bisect_left(self._entries, self._ranks.pop(request_id)))[2]

    def count_before_new(self, key: PriorityKey, order: int) -> int:
        """Returns how many requests go before such a request, which is not in the queue."""
        return bisect_left(self._entries, (key, order))

    def work_before_s(self, key: PriorityKey, order: int) -> float:
        """Returns the predicted seconds before such a request, as if all requests of the queue were
        alike.
        """
        count = len(self._entries)
        return self.work_s * self.count_before_new(key, order) / count if count else 0.0

    def work_of_first_s(self, count: int) -> float:
        """Returns the predicted seconds of the first requests, each by itself."""
        return sum(entry[2].predicted_prefill_s for entry in self._entries[:count])

    def key(self, request: LiveRequest) -> PriorityKey:
        return self._ranks[request.id][0]

    def count_before(self, request: LiveRequest) -> int:
        """Returns how many requests go before one of the queue."""
        return bisect_left(self._entries, self._ranks[request.id])

    def before(self, request: LiveRequest) -> list[LiveRequest]:
        """Returns the requests that go before one of the queue."""
        return [entry[2] for entry in self._entries[: self.count_before(request)]]

    def rerank(self, keys: Mapping[str, PriorityKey]) -> None:
        """Gives the requests that are among `keys`, by id, their new keys."""
        if len(keys) * _SORTS_FROM < len(self._entries):
            for name, key in keys.items():
                if name in self._ranks:
                    self._insert(self._take_out(name), key)
        elif keys:
            rows = self._entries
            self._entries = [(keys.get(one.id, key), order, one) for key, order, one in rows]
            self._entries.sort(key=_rank)
            self._ranks = {entry[2].id: _rank(entry) for entry in self._entries}

    def rank_by(self, ranking: Ranking, now_s: float) -> None:
        """Ranks all requests again."""
        self.ranking = ranking
        self.rerank({one.id: ranking.add(one, now_s) for one in self})


def _rank(entry: _Entry) -> _Rank:
    return entry[0], entry[1]
