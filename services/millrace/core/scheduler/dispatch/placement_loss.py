"""The predicted loss of placing a request at a decode instance, in values of requests.

A placement makes the steps of an instance longer. It loses the value (`Policy.value`) of every
running answer whose pace the longer step would break, and the request's own value if its own pace
would be broken, or if its first token would come too late on the way over this instance. A pace is
the longest mean time between tokens that keeps a request's TBT and end-to-end objectives. Steps
are predicted over all tokens that pages are booked for (`DecodeInstance.step_with_s`). Lateness
alone decides between placements that break the same: a pace that is broken further, or a first
token that needs more of its time, weighs `LATENESS` of a value at most.

Where a pool has both prefill and mixed instances, the ways to the first token differ:

- over prefill instances: the work before the request there, and its own;
- at a mixed instance: the prompts before it there, and its own prefill, each longer by the share of
  an iteration that the running answers take (`DecodeInstance.prefill_s`). The packer keeps the
  iterations within the tightest TBT objective, so prefill there breaks no pace that the step of the
  answers alone would keep.

The request waits where every placement would break more than a wait. A wait loses the request's own
value from the time on at which the first token can't be in time after a further wait, and nothing
before. What no wait can save is not waited for: an answer whose pace is broken already, and the
request's own pace where an empty instance would break it, too. So a client that states an objective
which nobody could keep delays no other client. An empty instance takes the request without any
wait. The request keeps one instance to itself while it waits (`decode_placement`), so it waits at
most until the answers there have ended.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Final, NamedTuple

from millrace.core.live_request import LiveRequest
from millrace.core.scheduler.fleet.cluster import Cluster
from millrace.core.scheduler.fleet.instances import DecodeInstance, Holding
from millrace.core.scheduler.request_table import RequestTable

#: What lateness by all of an objective weighs, as a share of a value.
LATENESS: Final = 0.01

#: Returns the predicted seconds to the request's first token, if the instance is its KV owner.
PredictTtft = Callable[[DecodeInstance], float]


class _Paces(NamedTuple):
    """What a placement loses by longer steps: of the running answers, of the request's own value,
    and of both what a wait could save.
    """

    others: float = 0.0
    own: float = 0.0
    avoidable: float = 0.0


class PlacementLoss:
    """Finds where a placement loses least. Reads the table, and changes nothing."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._cluster: Cluster = table.cluster

    def matters(self, request: LiveRequest, owners: Sequence[DecodeInstance]) -> bool:
        """Returns whether placements at the instances can lose anything, or lose differently."""
        if request.pace_s < math.inf or any(one.tightest_tbt_s < math.inf for one in owners):
            return True
        return request.allowed_ttft_s is not None and _two_ways(owners)

    def least(
        self,
        request: LiveRequest,
        able: Sequence[DecodeInstance],
        now_s: float,
        ttft_s: PredictTtft,
    ) -> list[DecodeInstance]:
        """Returns the instances of `able` with the least loss; none where the request is to wait.

        `able` have the pages. The order of `able` is kept.
        """
        if not able:
            return []
        value = self._cluster.policy.value(request)
        late = self._lateness(request, able, now_s, ttft_s, value)
        found: dict[str, float] = {}
        for one in able:
            slack_s, late_loss = late[one.id]
            paces = self._paces(request, one, value)
            if one.sequences and self._waits(request, paces.avoidable, slack_s, value):
                continue
            # A request is lost once: by its pace or by its first token.
            found[one.id] = paces.others + max(paces.own, late_loss)
        if not found:
            return []
        least = min(found.values())
        return [one for one in able if found.get(one.id) == least]

    def _waits(self, request: LiveRequest, loss: float, slack_s: float, value: float) -> bool:
        """Returns whether a wait loses less than a placement that loses so much."""
        if loss <= 0.0:
            return False
        if request.allowed_ttft_s is None or not 0.0 <= slack_s < self._table.config.heartbeat_s:
            return True  # it has time, or is too late in any case
        return value <= loss

    def _lateness(
        self,
        request: LiveRequest,
        able: Sequence[DecodeInstance],
        now_s: float,
        ttft_s: PredictTtft,
        value: float,
    ) -> dict[str, tuple[float, float]]:
        """Returns, by instance, the slack of the first token in seconds, and the loss."""
        allowed_s = request.allowed_ttft_s
        if allowed_s is None:
            return dict.fromkeys((one.id for one in able), (math.inf, 0.0))
        found = {}
        two_ways, by_prefill = _two_ways(able), math.nan
        for one in able:
            if one.card.role == "mixed" or math.isnan(by_prefill):
                predicted_s = ttft_s(one)
                if one.card.role != "mixed":
                    by_prefill = predicted_s
            else:
                predicted_s = by_prefill
            slack_s = request.deadline_s - now_s - predicted_s
            loss = 0.0
            if two_ways:  # the later within its time, the likelier that it is late in the end
                loss = value * LATENESS * _share(predicted_s, allowed_s)
                if slack_s < 0.0:
                    loss = value * (1.0 + LATENESS * _share(-slack_s, allowed_s))
            found[one.id] = slack_s, loss
        return found

    def _paces(self, request: LiveRequest, one: DecodeInstance, value: float) -> _Paces:
        """Returns what the step with the request loses."""
        step = one.card.decode_step
        if step is None:
            return _Paces()
        after_s = one.step_with_s(request)
        own = others = avoidable = 0.0
        if request.pace_s < after_s:
            own = value * (1.0 + LATENESS * _share(after_s - request.pace_s, request.pace_s))
            if request.pace_s >= one.step_with_s(request, alone=True):
                avoidable = value
        if one.tightest_tbt_s < after_s:
            before_s = step.seconds(one.sequences, one.context_tokens)
            for request_id, holding in one.holdings.items():
                pace_s = holding.tbt_s
                if pace_s >= after_s:
                    continue
                worth = self._value(request_id, holding)
                others += worth * LATENESS * _share(after_s - max(before_s, pace_s), pace_s)
                if pace_s >= before_s:
                    others += worth
                    avoidable += worth
        return _Paces(others, own, avoidable)

    def _value(self, request_id: str, holding: Holding) -> float:
        running = None if holding.leaving else self._table.requests.get(request_id)
        return 0.0 if running is None else self._cluster.policy.value(running)


def _share(late_s: float, allowed_s: float) -> float:
    return min(late_s / allowed_s, 1.0) if allowed_s > 0.0 else 1.0


def _two_ways(owners: Iterable[DecodeInstance]) -> bool:
    """Returns whether some instances prefill themselves and others don't."""
    return len({one.card.role == "mixed" for one in owners}) > 1
