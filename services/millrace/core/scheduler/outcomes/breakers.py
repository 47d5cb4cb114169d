"""Circuit breakers: keep new requests from an instance that lives but fails what it gets.

An error of an instance ("compute"), or between instances ("transfer"), counts against all of them
until a success clears them. When `scheduler.breaker_errors` requests in a row have failed at an
instance, its breaker opens: it gets no new request for a pause. Then the breaker is half-open: the
instance gets one request as a probe, an attempt that was not made before the end of the pause. A
success of the probe closes the breaker; a failure opens it again, for twice the pause. To decode
for `scheduler.isolation_s` is a success, too.

Requests wait for an instance whose breaker is open as they wait for its room. So none is refused
because all breakers are open.

Who is to blame:

- A refusal (no room, a prompt that can't be read) is no error.
- A request counts once against an instance, however often it fails there. When it fails again, only
  the instances that took part in all its errors stay blamed. If none did, the fault is its own: all
  its errors are forgotten, and later ones do not count. So a request that fails everywhere opens no
  breaker. Nor do the errors of a suspect (`dispatch.suspects`).
- When several instances have enough errors, the one that fails with the most different others is
  opened; of equals, the one with the most errors. Where these are equal, too, nothing tells the
  sender from the receiver: none is opened before one of them succeeds, or fails with another. After
  twice as many errors the receiver is: its senders then meet others, so a fault of a sender shows.
- Errors of an open instance do not count against the others.
- Requests that fail with "compute" are not tried again, so many bad ones look like a bad instance.
  Because of such errors, breakers of at most half of the instances of a role are not closed.
- The errors with an instance that drains are explained by that and do not count. Those with an
  instance that leaves are forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from millrace.core.backoff import Backoff
from millrace.core.config import SchedulerConfig
from millrace.core.live_request import LiveRequest
from millrace.core.request import RequestState
from millrace.core.scheduler.fleet.cluster import Cluster
from millrace.core.scheduler.fleet.instances import Instance, PrefillInstance

#: The longest pause, in first pauses.
MOST_PAUSES: Final = 32

#: So many of the last errors are remembered.
MOST_ERRORS: Final = 256

#: What a request's first decode step proves, and what its last token proves of its decode instance.
TRANSFER: Final = frozenset({"transfer"})
ALL: Final = frozenset({"compute", "transfer"})


@dataclass(slots=True)
class _Error:
    """The errors of one request."""

    request_id: str
    fault: str
    parties: set[str]  # instances that took part in all of them


@dataclass(slots=True)
class _Breaker:
    """A breaker that is not closed."""

    fault: str  # the kind of error that opened it
    until_s: float
    blamed: deque[frozenset[str]]  # the instances of each error that opened it
    failed_probes: int = 0
    #: Half-open: the requests, with their attempts, that were made there when the pause ended.
    before: frozenset[tuple[str, int]] | None = None


class Breakers:
    """The breakers of all instances. `requests`: those that have not ended."""

    def __init__(
        self, config: SchedulerConfig, cluster: Cluster, requests: Mapping[str, LiveRequest]
    ) -> None:
        self.opened = 0  # times so far
        self._least = config.breaker_errors
        self._backoff = Backoff(
            config.breaker_pause_s, MOST_PAUSES * config.breaker_pause_s, spread=0.0
        )
        self._proof_s = config.isolation_s  # time of decoding that is a success
        self._cluster = cluster
        self._requests = requests
        self._errors: deque[_Error] = deque(maxlen=MOST_ERRORS)
        self._breakers: dict[str, _Breaker] = {}

    # ---- what is shown

    @property
    def open(self) -> int:
        """Returns the instances whose breaker is open or half-open."""
        return len(self._breakers)

    def state(self, instance_id: str) -> str:
        """Returns "closed", "open" or "half_open"."""
        breaker = self._breakers.get(instance_id)
        if breaker is None:
            return "closed"
        return "open" if breaker.before is None else "half_open"

    def closed_to_all(self) -> set[str]:
        """Returns the instances that get no new request now: they pause, or have their probe."""
        return {
            name
            for name, breaker in self._breakers.items()
            if breaker.before is None or self._probes(name)
        }

    # ---- what happens

    def failed(
        self, request: LiveRequest, fault: str, parties: Collection[str], now_s: float
    ) -> list[str]:
        """Counts an error of a request at instances. Returns those whose breaker opened now."""
        suspicion = request.suspicion
        if not self._least or suspicion.all or suspicion.fails_everywhere:
            return []
        known = (self._cluster.instances.get(name) for name in parties)
        if any(one is not None and one.draining for one in known):
            return []
        probed = [name for name in sorted(parties) if self._is_probe(name, request)]
        if not self._blame(request, fault, set(parties)):
            return []
        opened = []
        for name in probed:
            failed = self._breakers[name]
            failed.blamed.append(frozenset(parties))
            self._open(name, fault, failed.blamed, failed.failed_probes + 1, now_s)
            opened.append(name)
        while (worst := self._worst(parties)) is not None:
            blamed = (frozenset(one.parties) for one in self._against(worst))
            self._open(worst, fault, deque(blamed, MOST_ERRORS), 0, now_s)
            opened.append(worst)
        return opened

    def proved(
        self, request: LiveRequest, parties: Collection[str], faults: frozenset[str]
    ) -> None:
        """Clears instances of errors of these kinds, after a success of a request."""
        for name in parties:
            breaker = self._breakers.get(name)
            if breaker is not None and breaker.fault in faults:
                if not self._is_probe(name, request):
                    continue  # it has begun before the pause
                del self._breakers[name]
            self._clear(name, faults)

    def left(self, instance_id: str) -> None:
        """Forgets an instance, and what it explains: the errors of others with it."""
        self._breakers.pop(instance_id, None)
        for error in [one for one in self._errors if instance_id in one.parties]:
            self._errors.remove(error)
        for name, breaker in list(self._breakers.items()):
            left = [one for one in breaker.blamed if instance_id not in one]
            breaker.blamed = deque(left, MOST_ERRORS)
            if not left:
                del self._breakers[name]

    def check(self, now_s: float) -> None:
        """Lets instances have a probe whose pause is over. Closes breakers of long probes."""
        for name, breaker in list(self._breakers.items()):
            if breaker.before is not None:
                for request in self._probes(name):
                    if self._has_decoded(request, now_s):
                        self.proved(request, request.kv_instance_ids, ALL)
            elif now_s >= breaker.until_s:
                breaker.before = frozenset(
                    (one.id, one.attempt)
                    for one in self._requests.values()
                    if name in one.instance_ids
                )

    # ---- blame

    def _blame(self, request: LiveRequest, fault: str, parties: set[str]) -> bool:
        """Notes an error. Returns False if it shows that the fault is the request's own."""
        known = next((one for one in self._errors if one.request_id == request.id), None)
        if known is None:
            self._errors.append(_Error(request.id, fault, parties))
            return True
        known.fault = fault
        known.parties &= parties
        if not known.parties:
            self._errors.remove(known)
            request.suspicion.fails_everywhere = True
        return bool(known.parties)

    def _clear(self, name: str, faults: frozenset[str]) -> None:
        for error in [one for one in self._errors if one.fault in faults]:
            error.parties.discard(name)
            if not error.parties:
                self._errors.remove(error)

    def _worst(self, parties: Collection[str]) -> str | None:
        """Returns the instance whose breaker has to open; None if none has enough errors."""
        found: dict[tuple[int, int], list[Instance]] = {}
        for name in parties:
            if name in self._breakers or name not in self._cluster.instances:
                continue
            against = self._against(name)
            if len(against) < self._least:
                continue
            instance = self._cluster.instances[name]
            spares, broken = self._others(instance)
            if spares <= broken and any(one.fault == "compute" for one in against):
                continue
            others = {other for one in against for other in one.parties}
            found.setdefault((len(others), len(against)), []).append(instance)
        if not found:
            return None
        most, equals = max(found.items(), key=lambda one: one[0])
        if len(equals) > 1 and most[1] < 2 * self._least:
            return None
        return max(equals, key=lambda one: (not isinstance(one, PrefillInstance), one.id)).id

    def _against(self, name: str) -> list[_Error]:
        """Returns the errors that count against an instance: no open one explains them."""
        closed = self._breakers.keys()
        return [
            one for one in self._errors if name in one.parties and closed.isdisjoint(one.parties)
        ]

    def _others(self, instance: Instance) -> tuple[int, int]:
        """Returns how many other instances do the same work, and how many of them might if their
        breakers were closed.
        """
        card = instance.card
        same = [
            one.id in self._breakers
            for one in self._cluster.instances.values()
            if one is not instance
            and (one.card.role, one.card.model_hash) == (card.role, card.model_hash)
            and not one.draining
        ]
        return len(same) - sum(same), sum(same)

    # ---- probes

    def _open(
        self,
        name: str,
        fault: str,
        blamed: deque[frozenset[str]],
        failed_probes: int,
        now_s: float,
    ) -> None:
        self.opened += 1
        until_s = now_s + self._backoff.pause_s(failed_probes)
        self._breakers[name] = _Breaker(fault, until_s, blamed, failed_probes)

    def _probes(self, name: str) -> list[LiveRequest]:
        """Returns the requests that a half-open instance holds as probes."""
        holdings = self._cluster.instances[name].holdings.items()
        held = [self._requests[of] for of, one in holdings if not one.leaving]
        return [one for one in held if self._is_probe(name, one)]

    def _is_probe(self, name: str, request: LiveRequest) -> bool:
        """Returns whether a half-open instance got the request's attempt after its pause. It may
        have let go of it: prefill does before decode begins.
        """
        breaker = self._breakers.get(name)
        if breaker is None or breaker.before is None:
            return False
        return (request.id, request.attempt) not in breaker.before

    def _has_decoded(self, request: LiveRequest, now_s: float) -> bool:
        """Returns whether the request has decoded for so long that this is a success."""
        began_s = request.token_out_s if request.state is RequestState.DECODING else None
        return began_s is not None and now_s - began_s >= self._proof_s
