"""How long to wait between attempts."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

#: No pause is doubled more often: 2.0 ** 1024 overflows.
_MOST_DOUBLINGS = 64


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between attempts: the first lasts `first_s`, each later one twice as long, up to
    `most_s`.

    Each pause is drawn at random between (1 - spread) and (1 + spread) times its length: processes
    that failed together do not try again together. `draw` returns numbers in [0, 1);
    `Random(seed).random` makes pauses that repeat. Raises ValueError for values out of range.
    """

    first_s: float
    most_s: float
    spread: float = 0.3
    draw: Callable[[], float] = random.random

    def __post_init__(self) -> None:
        if not 0 <= self.first_s <= self.most_s:
            raise ValueError(
                f"first_s is {self.first_s} and most_s is {self.most_s}; "
                "0 <= first_s <= most_s must hold"
            )
        if not 0 <= self.spread <= 1:
            raise ValueError(f"spread is {self.spread}; it must be in [0, 1]")

    def pause_s(self, earlier: int) -> float:
        """Returns the seconds to wait after a failure. `earlier`: the failures in a row before it;
        a success begins again at 0.
        """
        length_s = min(self.first_s * 2.0 ** min(earlier, _MOST_DOUBLINGS), self.most_s)
        return length_s * (1 + self.spread * (2 * self.draw() - 1))
