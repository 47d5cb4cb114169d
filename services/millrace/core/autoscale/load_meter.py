"""Measures a fleet's load in the scheduler: `LoadMeter.load(now_s) -> FleetLoad`.

Not from a paper. `saw` gets every step of the machine. `load` reads the rest from the machine at
the time of the call. Rates and ratios cover the last `window_s` seconds.

- `arriving` includes requests that were refused as too many: they are load that the pool could not
  take.
- A TTFT counts when the first token is out, and earlier from the moment when its objective is
  missed: a pool that stands still emits no first tokens and must not look idle. The TTFT of a
  request that ended without a token counts too, if it had missed its objective.
- A TBT counts when the answer ends, as the mean over the answer. While the answer runs, the time
  between tokens from its instance's last heartbeat counts: an answer may run for minutes.
- A request that waits for a decode instance's pages waits for nothing that prefill could do. So
  `backlog_s` and the TTFT leave it out, and `kv_utilisation` includes it and may exceed 1. The pool
  that lacks capacity is then the pool that grows. A prefill-only request waits for prefill alone.

A fleet prefills on instances of one role, prefill or mixed. With both roles, each role's load is
that of the whole fleet. A role has a load even after its last instance left: requests may wait for
the next instance.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from millrace.core.autoscale.load import FleetLoad, PoolLoad
from millrace.core.autoscale.rules import Context
from millrace.core.live_request import LiveRequest
from millrace.core.request import Request, RequestState
from millrace.core.scheduler.effects import Effect, Place, Record, Refuse
from millrace.core.scheduler.events import Event, Reported, Submitted
from millrace.core.scheduler.fleet.instances import (
    DecodeInstance,
    Instance,
    KvpInstance,
    PrefillInstance,
)
from millrace.core.scheduler.machine import Machine
from millrace.core.scheduler.reports import RequestFinished

WINDOW_S = 15.0

#: Arrivals are divided by at least this many seconds: one request in the first moment is no rate.
LEAST_SPAN_S = 5.0

_PREFILLS = frozenset({RequestState.QUEUED, RequestState.PREFILLING, RequestState.TRANSFERRING})

#: A latency over its objective, and the class whose objective it is.
_Ratio = tuple[str, float]


@dataclass(slots=True)
class _Unanswered:
    """A request with a TTFT objective that its prefill alone can meet."""

    request: LiveRequest
    placed_s: float | None = None  # for the first time

    def ratio(self, now_s: float) -> _Ratio | None:
        """Returns time to the first token (so far, if none is out) over its objective; None before
        placement.
        """
        if self.placed_s is None:
            return None
        until_s = now_s if self.request.first_token_s is None else self.request.first_token_s
        return _over(self.request.slo.class_name, until_s - self.placed_s, self.request.slo.ttft_s)


class LoadMeter:
    """Measures all pools of one machine. `since_s`: the time of its first step."""

    def __init__(self, machine: Machine, since_s: float, window_s: float = WINDOW_S) -> None:
        self._machine = machine
        self._since_s = since_s
        self._window_s = window_s
        self._arrived: deque[tuple[float, float]] = deque()  # (when, seconds of one instance)
        self._ttft: deque[tuple[float, _Ratio]] = deque()
        self._tbt: deque[tuple[float, _Ratio]] = deque()
        self._unanswered: dict[str, _Unanswered] = {}
        self._paced: dict[str, LiveRequest] = {}  # with a TBT objective
        self._roles = {"prefill", "decode"}  # and mixed, once there was such an instance

    # ---- inputs

    def saw(self, event: Event, effects: Iterable[Effect], now_s: float) -> None:
        """Takes in one step of the machine, immediately after the step."""
        if isinstance(event, Submitted):
            self._submitted(event.request, effects, now_s)
        for effect in effects:
            if isinstance(effect, Record):
                self._recorded(effect, event, now_s)
            elif isinstance(effect, Place):
                self._placed(effect, now_s)

    def _submitted(self, asked: Request, effects: Iterable[Effect], now_s: float) -> None:
        request = self._machine.requests.get(asked.id)
        if request is None or request.spec is not asked:
            if any(isinstance(e, Refuse) and e.code == "overloaded" for e in effects):
                self._note_arrival(self._machine.prefill_work_s(asked), now_s)
            return
        self._note_arrival(request.predicted_work_s, now_s)
        slo = request.slo
        if slo.ttft_s and request.predicted_prefill_s <= slo.ttft_s:
            self._unanswered[request.id] = _Unanswered(request)
        if slo.tbt_s:
            self._paced[request.id] = request

    def _note_arrival(self, work_s: float, now_s: float) -> None:
        self._arrived.append((now_s, work_s))
        _forget(self._arrived, now_s - self._window_s)

    def _placed(self, effect: Place, now_s: float) -> None:
        waiting = self._unanswered.get(effect.request_id)
        if waiting is not None and waiting.placed_s is None:
            waiting.placed_s = now_s

    def _recorded(self, record: Record, event: Event, now_s: float) -> None:
        request_id = record.request_id
        waiting = self._unanswered.get(request_id)
        if waiting is not None:
            answered = waiting.request.first_token_s is not None
            if answered or record.state.is_final:
                del self._unanswered[request_id]
                ratio = waiting.ratio(now_s)
                if ratio is not None and (answered or ratio[1] > 1.0):
                    self._note(self._ttft, ratio, now_s)
        if record.state.is_final and (ended := self._paced.pop(request_id, None)) is not None:
            for ratio in _tbt_of_answer(ended, event, now_s):
                self._note(self._tbt, ratio, now_s)

    def _note(self, seen: deque[tuple[float, _Ratio]], ratio: _Ratio, now_s: float) -> None:
        seen.append((now_s, ratio))
        _forget(seen, now_s - self._window_s)

    # ---- signals

    def load(self, now_s: float, parked_requests: int = 0) -> FleetLoad:
        """The load at `now_s`; `parked_requests` are the requests that the proxies hold back."""
        for seen in (self._arrived, self._ttft, self._tbt):
            _forget(seen, now_s - self._window_s)
        self._roles |= {one.card.role for one in self._instances()} - {"kvp"}
        pools = [*(self._pool(role, now_s) for role in sorted(self._roles)), self._kvp(now_s)]
        return FleetLoad(pools={pool.role: pool for pool in pools}, parked_requests=parked_requests)

    def _instances(self) -> Iterable[Instance]:
        return self._machine.cluster.instances.values()

    def _pool(self, role: str, now_s: float) -> PoolLoad:
        known = [one for one in self._instances() if one.card.role == role]
        ready = [one for one in known if not one.draining]
        prefills, decodes = role != "decode", role != "prefill"
        requests = self._machine.requests.values()
        return PoolLoad(
            role=role,
            ready=len(ready),
            draining=len(known) - len(ready),
            active_requests=sum(decodes or one.state in _PREFILLS for one in requests),
            backlog_s=self._backlog_s(known, now_s) if prefills else None,
            arriving=self._arriving(now_s) if prefills else None,
            ttft_slo_ratio=_worst(self._ttfts(now_s)) if prefills else None,
            kv_utilisation=self._kv_utilisation(ready) if decodes else None,
            tbt_slo_ratio=_worst(self._tbts()) if decodes else None,
        )

    def _backlog_s(self, known: Iterable[Instance], now_s: float) -> float:
        """Returns the predicted seconds of one instance for waiting requests and for these
        instances' tasks.

        A mixed instance orders its own work, and reports only the end of a prefill.
        """
        mixed = {one.id for one in known if isinstance(one, DecodeInstance)}
        served = any(not one.draining for one in known)
        waiting_s = 0.0
        for request in self._machine.requests.values():
            if request.state is RequestState.QUEUED:
                placed = request.decode_id is not None or request.prefill_only
                waits = placed or not served
            else:
                waits = request.state is RequestState.PREFILLING and request.decode_id in mixed
            if waits:
                waiting_s += request.remaining_work_s(now_s)
        prefills = (one for one in known if isinstance(one, PrefillInstance))
        return waiting_s + sum(one.outstanding_s(now_s) for one in prefills)

    def _arriving(self, now_s: float) -> float:
        span_s = min(self._window_s, max(now_s - self._since_s, LEAST_SPAN_S))
        return sum(work_s for _, work_s in self._arrived) / span_s

    def _ttfts(self, now_s: float) -> Iterator[_Ratio]:
        yield from (ratio for _, ratio in self._ttft)
        for waiting in self._unanswered.values():
            ratio = waiting.ratio(now_s)
            if ratio is not None and ratio[1] > 1.0:
                yield ratio

    def _kv_utilisation(self, ready: Iterable[Instance]) -> float | None:
        """Returns the share of decode's pages that requests hold, are to hold, and wait for."""
        decodes = [one for one in ready if isinstance(one, DecodeInstance)]
        slots = sum(one.card.kv_pages * one.page_tokens for one in decodes)
        if not slots:
            return None
        used = slots - sum(one.open_pages * one.page_tokens for one in decodes)
        page_tokens = decodes[0].page_tokens
        helped = any(isinstance(one, KvpInstance) for one in self._instances())
        for request in self._machine.requests.values():
            if request.decode_id is None and not request.prefill_only:
                at_owner = self._waits_to_spread(request) if helped else None
                pages = decodes[0].booked_for(request)
                used += page_tokens * pages if at_owner is None else at_owner
        return used / slots

    def _tbts(self) -> Iterator[_Ratio]:
        yield from (ratio for _, ratio in self._tbt)
        for request in self._paced.values():
            owner = self._machine.cluster.instances.get(request.decode_id or "")
            decoding = request.state is RequestState.DECODING
            if decoding and isinstance(owner, DecodeInstance) and owner.tbt_s:
                yield _over(request.slo.class_name, owner.tbt_s, request.slo.tbt_s)

    def _kvp(self, now_s: float) -> PoolLoad:
        """Returns the KVP load: the context of each request that is spread or will be spread."""
        known = [one for one in self._instances() if isinstance(one, KvpInstance)]
        ready = sum(not one.draining for one in known)
        requests = self._machine.requests.values()
        found = (self._context(request, now_s) for request in requests)
        contexts = tuple(context for context in found if context is not None)
        return PoolLoad(
            role="kvp",
            ready=ready,
            draining=len(known) - ready,
            active_requests=len(contexts),
            contexts=contexts,
        )

    def _context(self, request: LiveRequest, now_s: float) -> Context | None:
        """Returns the request's context; None if it needs no KVP worker: decode instances hold all
        of it.
        """
        final_tokens = request.prompt_tokens + request.max_new_tokens
        if request.decode_id is None:
            at_owner = None if request.prefill_only else self._waits_to_spread(request)
            if at_owner is None:
                return None
            return Context(tokens=final_tokens, final_tokens=final_tokens, owner_tokens=at_owner)
        instances = self._machine.cluster.instances
        elsewhere = sum(
            shard.num_tokens
            for shard in request.shards
            if isinstance(instances.get(shard.worker_id), KvpInstance)
        )
        owner = instances[request.decode_id]
        if not elsewhere or not isinstance(owner, DecodeInstance):
            return None
        tokens, growth_tokens_s = request.landed_tokens, 0.0
        if request.first_token_s is not None:
            growth_tokens_s = 1.0 / owner.tbt_s if owner.tbt_s else 0.0
            answered = int((now_s - request.first_token_s) * growth_tokens_s)
            tokens = min(request.prompt_tokens + answered, final_tokens)
        elif request.predicted_prefill_s:
            growth_tokens_s = request.prompt_tokens / request.predicted_prefill_s
        return Context(
            tokens=tokens,
            final_tokens=final_tokens,
            growth_tokens_s=growth_tokens_s,
            owner_tokens=final_tokens - elsewhere,
        )

    def _waits_to_spread(self, request: LiveRequest) -> int | None:
        """Returns the tokens that a KV owner would hold at most, of an unplaced request that will
        be spread.

        None for a request that will not be spread.
        """
        found = None
        for pool in self._machine.cluster.ready_pools():
            owners = pool.kv_owners()
            if not pool.kvp_placement.wanted(request, owners):
                return None
            found = max(found or 0, pool.kvp_placement.longest_shard(request, owners))
        return found


def _tbt_of_answer(request: LiveRequest, event: Event, now_s: float) -> list[_Ratio]:
    """Returns the answer's mean TBT; empty if its length is unknown or it has no second token."""
    report = event.report if isinstance(event, Reported) else None
    if not isinstance(report, RequestFinished) or request.first_token_s is None:
        return []
    seconds = now_s - request.first_token_s
    following = report.generated_tokens / request.choices - 1.0
    if following <= 0.0 or seconds <= 0.0:
        return []
    return [_over(request.slo.class_name, seconds / following, request.slo.tbt_s)]


def _over(class_name: str, seconds: float, objective_s: float | None) -> _Ratio:
    assert objective_s  # only requests that have an objective are followed
    return class_name, seconds / objective_s


def _worst(ratios: Iterable[_Ratio]) -> float | None:
    """Returns the mean of the class with the highest mean; None without ratios."""
    classes: dict[str, list[float]] = {}
    for name, ratio in ratios:
        classes.setdefault(name, []).append(ratio)
    return max((sum(found) / len(found) for found in classes.values()), default=None)


def _forget(seen: deque[tuple[float, Any]], before_s: float) -> None:
    while seen and seen[0][0] < before_s:
        seen.popleft()
