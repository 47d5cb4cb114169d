"""A queue in a policy's order, with the predicted seconds of the work in it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping

from millrace.core.live_request import LiveRequest
from millrace.core.priority import PriorityKey

_Entry = tuple[PriorityKey, int, LiveRequest]


class WaitingQueue:
    """Requests by (key, order of submission). Adding and removing cost O(log n) comparisons."""

    def __init__(self) -> None:
        self._entries: list[_Entry] = []
        self._keys: dict[str, PriorityKey] = {}
        self.work_s = 0.0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._keys

    def __iter__(self) -> Iterator[LiveRequest]:
        """Yields requests in order. The queue must not change meanwhile."""
        return (entry[2] for entry in self._entries)

    def __getitem__(self, index: int) -> LiveRequest:
        return self._entries[index][2]

    def add(self, request: LiveRequest, key: PriorityKey) -> None:
        self._keys[request.id] = key
        insort(self._entries, (key, request.order, request), key=_rank)
        self.work_s += request.predicted_prefill_s

    def remove(self, request: LiveRequest) -> None:
        """Raises KeyError when the request is not in the queue."""
        rank = (self._keys.pop(request.id), request.order)
        del self._entries[bisect_left(self._entries, rank, key=_rank)]
        # An empty queue has no work: rounding errors don't outlive it.
        self.work_s = self.work_s - request.predicted_prefill_s if self._entries else 0.0

    def work_before_s(self, key: PriorityKey, order: int) -> float:
        """Returns the predicted seconds before such a request, as if all requests of the queue were
        alike.
        """
        count = len(self._entries)
        before = bisect_left(self._entries, (key, order), key=_rank)
        return self.work_s * before / count if count else 0.0

    def key(self, request: LiveRequest) -> PriorityKey:
        return self._keys[request.id]

    def rerank(self, keys: Mapping[str, PriorityKey]) -> None:
        """Gives every request of the queue its new key, by request id."""
        self._entries = [(keys[one.id], order, one) for _, order, one in self._entries]
        self._entries.sort(key=_rank)
        self._keys = {entry[2].id: entry[0] for entry in self._entries}


def _rank(entry: _Entry) -> tuple[PriorityKey, int]:
    return entry[0], entry[1]
