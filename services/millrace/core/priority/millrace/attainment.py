"""How the classes fare, and what it is worth to have a request in time.

An attainment is the share of requests in time (that met TTFT, TBT and end-to-end objective, as far
as they have them), of the last ones (exponentially weighted): of all, of each class, and of each
length band of a class. A request is worth 1, and more
where its class or band is behind `GOAL`:

    value = weight * (1 + h_all (price(a_class) - 1) + h_all h_class (price(a_band) - 1))
    price(a) = exp(min(1, SLOPE max(0, GOAL + MARGIN - a)))

h is 0 while the attainment around it (of all; of the class) is itself below what is asked, and
rises to 1 over `RAMP`: a class is helped by what others have to spare, and a band by what its class
has. The price is bounded by e, so that at most e requests of the same work are given up for one.
Where even all together are far behind (`OVERLOADED`), no order meets the goal; then the
class that is furthest behind goes first until all are equally late (max-min over weighted classes).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from millrace.core.live_request import LiveRequest
from millrace.core.weights import BATCH_CLASS

#: The share of requests in time that is asked of every class.
GOAL = 0.9
#: Attainments fluctuate: a class is helped until it is this much above the goal.
MARGIN = 0.05
#: h rises from 0 to 1 from this attainment on, over RAMP.
HELPS_FROM = 0.93
RAMP = 0.03
SLOPE = 60.0
HIGHEST_LOG_PRICE = 1.0
#: Where fewer than this share of all are in time, classes are made equal.
OVERLOADED = 0.86
EQUALISE_SLOPE = 30.0
HIGHEST_LOG_EQUALISER = 8.0
#: The weight of a new outcome among the last. What others have to spare is judged over a longer
#: time than how a band fares: a burst doesn't end the help that it makes necessary.
LEAST_ALPHA = 1 / 600
LEAST_ALPHA_OF_BAND = 1 / 150
_COUNTED_BEFORE = 20  # the first outcomes weigh as if so many had gone before them


class _Share:
    """The share of requests in time, of the last ones."""

    __slots__ = ("count", "least_alpha", "value")

    def __init__(self, least_alpha: float) -> None:
        self.value = HELPS_FROM
        self.count: float = _COUNTED_BEFORE
        self.least_alpha = least_alpha

    def note(self, in_time: bool, weight: float) -> None:
        self.count += weight
        alpha = max(1.0 / self.count, self.least_alpha) * weight
        self.value += alpha * (in_time - self.value)

    @property
    def headroom(self) -> float:
        """Returns h: from 0, nothing to spare for others, to 1."""
        return min(1.0, max(0.0, (self.value - HELPS_FROM) / RAMP))

    @property
    def price(self) -> float:
        behind = max(0.0, GOAL + MARGIN - self.value)
        return math.exp(min(HIGHEST_LOG_PRICE, SLOPE * behind))


class _Class:
    __slots__ = ("bands", "share", "weight")

    def __init__(self, weight: float) -> None:
        self.share = _Share(LEAST_ALPHA)
        self.weight = weight
        self.bands: dict[int, Band] = {}


class Band:
    """The requests of one class and of similar length, and the `value` of each now."""

    __slots__ = ("share", "value")

    def __init__(self) -> None:
        self.share = _Share(LEAST_ALPHA_OF_BAND)
        self.value = 1.0


class Attainments:
    """The attainments by class and band. Learns from outcomes."""

    def __init__(self) -> None:
        self._all = _Share(LEAST_ALPHA)
        self._classes: dict[str, _Class] = {}
        self._weights: Mapping[str, float] = {}
        self._is_outdated = False  # outcomes came since values were found

    @property
    def headroom(self) -> float:
        """Returns what all requests together have to spare: h, from 0 to 1."""
        return self._all.headroom

    def band(self, request: LiveRequest) -> Band:
        """Returns the band of the request: prompts within a factor of 8 in tokens share one."""
        self.refresh()
        return self._band(request)

    def _band(self, request: LiveRequest) -> Band:
        name = request.slo.class_name
        own = self._classes.get(name)
        if own is None:
            own = self._classes[name] = _Class(self._weight(name))
        number = (request.prompt_tokens.bit_length() + 2) // 3
        band = own.bands.get(number)
        if band is None:
            band = own.bands[number] = Band()
            self._value(own)
        return band

    def weigh(self, weights: Mapping[str, float]) -> None:
        """Takes other weights of the classes from now on."""
        self._weights = weights
        for name, own in self._classes.items():
            own.weight = self._weight(name)
            self._value(own)

    def is_background(self, request: LiveRequest) -> bool:
        """Returns whether the request goes after all others: its class is worth nothing."""
        return self._weight(request.slo.class_name) == 0.0

    def _weight(self, name: str) -> float:
        """Returns the weight of a class. The class `batch` has none unless it is configured."""
        return self._weights.get(name, 0.0 if name == BATCH_CLASS else 1.0)

    def judge(self, request: LiveRequest, in_time: bool, weight: float = 1.0) -> None:
        """Notes at a request with an objective whether it met all of them, and counts that as
        `weight` outcomes, 0 to 1.
        """
        request.judge(in_time)
        self.note(request, in_time, weight)

    def note(self, request: LiveRequest, in_time: bool, weight: float = 1.0) -> None:
        """Counts the outcome of a request with an objective as `weight` outcomes, 0 to 1."""
        band = self._band(request)
        own = self._classes[request.slo.class_name]
        for share in (self._all, own.share, band.share):
            share.note(in_time, weight)
        self._is_outdated = True

    def of_class(self, name: str) -> float | None:
        """Returns the attainment of a class; None before its first request."""
        own = self._classes.get(name)
        return None if own is None else own.share.value

    def refresh(self) -> None:
        """Brings all values up to date with the outcomes."""
        if self._is_outdated:
            self._is_outdated = False
            for one in self._classes.values():
                self._value(one)

    def _value(self, own: _Class) -> None:
        helped, overload = self._all.headroom, OVERLOADED - self._all.value
        value = 1.0 + helped * (own.share.price - 1.0)
        if overload > 0.0:
            behind = EQUALISE_SLOPE * (self._all.value - own.share.value)
            log_value = max(-HIGHEST_LOG_EQUALISER, min(HIGHEST_LOG_EQUALISER, behind))
            value = math.exp(min(1.0, overload / RAMP) * log_value)
        for_bands = helped * own.share.headroom
        for band in own.bands.values():
            band.value = own.weight * (value + for_bands * (band.share.price - 1.0))
