"""Gaps between arrivals of synthetic traffic that is not Poisson.

Each function yields gaps in units of the mean gap, so that the mean rate alone sets the scale of
time. Bursts and days are therefore counted in requests: at twice the rate they last half as long.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

Gaps = Callable[[random.Random], Iterator[float]]


def bursts(calm: int, burst: int, factor: float) -> Gaps:
    """Switches between calm and burst (a Markov-modulated Poisson process).

    `calm` and `burst` are the mean numbers of requests in a row of each; in a burst requests come
    `factor` times as fast as the mean rate.
    """
    calm_gap = (calm + burst - burst / factor) / calm

    def gaps(rng: random.Random) -> Iterator[float]:
        while True:
            for mean, gap in ((calm, calm_gap), (burst, 1 / factor)):
                while True:
                    yield rng.expovariate(1 / gap)
                    if rng.random() * mean < 1.0:
                        break

    return gaps


def day(requests: int, swing: float) -> Gaps:
    """Lets the rate rise and fall as a sine, once in `requests`, by `swing` of its middle."""
    level = math.sqrt(1 - swing * swing)  # 1 / the mean of 1 / (1 + swing sin)

    def gaps(rng: random.Random) -> Iterator[float]:
        while True:
            for index in range(requests):
                rate = 1 + swing * math.sin(2 * math.pi * index / requests)
                yield rng.expovariate(1.0) * level / rate

    return gaps
