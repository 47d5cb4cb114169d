"""Circuit breakers: keep new requests from an instance that lives but fails what it gets.

An error of an instance ("compute"), or between instances ("transfer"), counts against all of them
until a success clears them. When `scheduler.breaker_errors` requests in a row have failed at an
instance, its breaker opens: it gets no new request for a pause. Then the breaker is half-open: the
instance gets one request as a probe. A success of the probe closes the breaker; a failure opens it
again, for twice the pause.

Requests wait for an instance whose breaker is open as they wait for its room. So none is refused
because all breakers are open.

Who is to blame:

- A refusal (no room, a prompt that can't be read) is no error.
- A request counts once against an instance, however often it fails there. When it fails again, only
  the instances that took part in all its errors stay blamed. If none did, the fault is its own: all
  its errors are forgotten, and later ones do not count. So a request that fails everywhere opens no
  breaker. Nor do the errors of a suspect (`dispatch.suspects`).
- When several instances have enough errors, the one that fails with the most different others is
  opened; then the one with the most others of its role. Errors of an open instance do not count
  against the others.
- Requests that fail with "compute" are not tried again, so many bad ones look like a bad instance.
  Because of such errors, breakers of at most half of the instances of a role are not closed.
- The errors with an instance that drains are explained by that and do not count. Those with an
  instance that leaves are forgotten.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from millrace.core.backoff import Backoff
from millrace.core.config import SchedulerConfig
from millrace.core.live_request import LiveRequest
from millrace.core.scheduler.fleet.cluster import Cluster
from millrace.core.scheduler.fleet.instances import Instance

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
    failed_probes: int = 0
    held: frozenset[str] | None = None  # half-open: requests there when the pause ended


class Breakers:
    """The breakers of all instances."""

    def __init__(self, config: SchedulerConfig, cluster: Cluster) -> None:
        self.opened = 0  # times so far
        self._least = config.breaker_errors
        self._backoff = Backoff(
            config.breaker_pause_s, MOST_PAUSES * config.breaker_pause_s, spread=0.0
        )
        self._cluster = cluster
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
        return "open" if breaker.held is None else "half_open"

    def closed_to_all(self) -> set[str]:
        """Returns the instances that get no new request now: they pause, or have their probe."""
        return {
            name
            for name, breaker in self._breakers.items()
            if breaker.held is None or self._has_probe(name, breaker.held)
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
        probed = [name for name in sorted(parties) if self._is_probe(name, request.id)]
        if not self._blame(request, fault, set(parties)):
            return []
        opened = []
        for name in probed:
            before = self._breakers[name]
            self._open(name, fault, before.failed_probes + 1, now_s)
            opened.append(name)
        while (worst := self._worst(parties)) is not None:
            self._open(worst, fault, 0, now_s)
            opened.append(worst)
        return opened

    def proved(
        self, request: LiveRequest, parties: Collection[str], faults: frozenset[str]
    ) -> None:
        """Clears instances of errors of these kinds, after a success of a request."""
        for name in parties:
            breaker = self._breakers.get(name)
            if breaker is not None and breaker.fault in faults:
                if not self._is_probe(name, request.id):
                    continue  # it has begun before the pause
                del self._breakers[name]
            self._clear(name, faults)

    def left(self, instance_id: str) -> None:
        """Forgets an instance, and what it explains: the errors of others with it."""
        self._breakers.pop(instance_id, None)
        explained = [one for one in self._errors if instance_id in one.parties]
        for error in explained:
            self._errors.remove(error)
        for name in {name for one in explained for name in one.parties} & self._breakers.keys():
            if not any(name in one.parties for one in self._errors):
                del self._breakers[name]

    def check(self, now_s: float) -> None:
        """Lets instances have a probe whose pause is over."""
        for name, breaker in self._breakers.items():
            if breaker.held is None and now_s >= breaker.until_s:
                breaker.held = frozenset(self._cluster.instances[name].holdings)

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
        found: list[tuple[int, int, str]] = []
        for name in parties:
            if name in self._breakers or name not in self._cluster.instances:
                continue
            against = [one for one in self._errors if name in one.parties]
            against = [one for one in against if self._breakers.keys().isdisjoint(one.parties)]
            if len(against) < self._least:
                continue
            spares, broken = self._others(self._cluster.instances[name])
            if spares <= broken and any(one.fault == "compute" for one in against):
                continue
            others = {other for one in against for other in one.parties}
            found.append((len(others), spares, name))
        return max(found)[2] if found else None

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

    def _open(self, name: str, fault: str, failed_probes: int, now_s: float) -> None:
        self.opened += 1
        until_s = now_s + self._backoff.pause_s(failed_probes)
        self._breakers[name] = _Breaker(fault, until_s, failed_probes)

    def _has_probe(self, name: str, held: frozenset[str]) -> bool:
        """Returns whether the instance holds a request that it did not hold before."""
        holdings = self._cluster.instances[name].holdings.items()
        return any(of not in held and not one.leaving for of, one in holdings)

    def _is_probe(self, name: str, request_id: str) -> bool:
        """Returns whether the half-open instance got the request after its pause. It may have let
        go of it: prefill does before decode begins.
        """
        breaker = self._breakers.get(name)
        return breaker is not None and breaker.held is not None and request_id not in breaker.held
