"""The prompts of an instance that packs its own batches, in the order of a policy."""

from __future__ import annotations

from collections.abc import Container

from millrace.core.live_request import LiveRequest
from millrace.core.priority import POLICIES, PriorityKey
from millrace.core.priority.own_order import ranking_of
from millrace.core.weights import Weights


class PromptOrder:
    """Ranks one instance's prompts, as the scheduler ranks requests."""

    def __init__(self, policy: str) -> None:
        """`policy` is a name of `core.priority.POLICIES`."""
        self._requests: dict[str, LiveRequest] = {}
        self._keys: dict[str, PriorityKey] = {}
        self._ordered: list[LiveRequest] | None = []  # None: to be sorted
        self._weights = Weights()
        self._policy = POLICIES[policy]()
        self._ranking = ranking_of(self._policy)

    @property
    def policy(self) -> str:
        return self._policy.name

    def __contains__(self, request: LiveRequest) -> bool:
        return self._requests.get(request.id) is request

    def rank_by(self, policy: str, now_s: float) -> None:
        """Ranks all prompts by another policy from now on."""
        self._policy = POLICIES[policy]()
        self._policy.weigh(self._weights)
        self._ranking = ranking_of(self._policy)
        for request in self._requests.values():
            self.add(request, now_s)

    def weigh(self, weights: Weights) -> None:
        """Uses these weights of classes and tenants from now on."""
        self._weights = weights
        self._policy.weigh(weights)

    def add(self, request: LiveRequest, now_s: float) -> None:
        self._requests[request.id] = request
        self._keys[request.id] = self._ranking.add(request, now_s)
        self._ordered = None

    def remove(self, request: LiveRequest, now_s: float) -> None:
        """Forgets a prompt that gets no first token here; harmless if it is unknown."""
        if request in self:
            self._policy.ended(request, now_s)
        self._drop(request)

    def _drop(self, request: LiveRequest) -> None:
        if self._requests.pop(request.id, None) is not None:
            del self._keys[request.id]
            self._ranking.remove(request)
            self._ordered = None

    def keep_only(self, request_ids: Container[str], now_s: float) -> None:
        """Forgets all other prompts, which get no first token here."""
        for request in [one for name, one in self._requests.items() if name not in request_ids]:
            self.remove(request, now_s)

    def started(self, request: LiveRequest) -> None:
        """Notes that tokens of a prompt are computed."""
        self._policy.started(request)

    def computed(self, request: LiveRequest, now_s: float) -> None:
        """Forgets a prompt that has its first token."""
        self._policy.first_token(request, now_s)
        self._drop(request)

    def ordered(self, now_s: float) -> list[LiveRequest]:
        """Returns the prompts, the one to compute first at the head."""
        changed = self._ranking.update(now_s, 1)
        self._keys.update(changed)
        if changed or self._ordered is None:
            keys = self._keys
            requests = self._requests.values()
            self._ordered = sorted(requests, key=lambda one: (keys[one.id], one.order))
        return self._ordered
