"""Length distributions of which only a few published figures are known.

Each function returns a draw in whole tokens, at least 1. They stand in for traces that were never
published: each docstring says which figures are published and which are assumed.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from statistics import NormalDist

from millrace.core.errors import ConfigError
from millrace.sim.workload.workload import Draw

_UNIT = NormalDist()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split()))


#: ShareGPT4 conversations capped at 8k tokens, the short traffic of Medha section 6.1: every 1/64
#: quantile of 30,731 prompts and outputs. From microsoft/sarathi-serve (Apache-2.0),
#: data/processed_traces/sharegpt_8k_filtered_stats_llama2_tokenizer.csv. The two are drawn
#: independently (their correlation in the file is 0.04).
SHAREGPT_INPUT = _numbers(
    "1 14 21 27 36 48 65 87 114 154 203 259 330 397 459 518 580 643 701 761 827 884 947 1012 "
    "1081 1157 1229 1307 1384 1475 1559 1640 1730 1826 1929 2038 2150 2249 2355 2471 2598 "
    "2719 2854 2980 3120 3260 3413 3571 3735 3893 4064 4238 4427 4617 4832 5057 5288 5534 "
    "5794 6049 6344 6624 6919 7273 8141"
)
SHAREGPT_OUTPUT = _numbers(
    "2 13 29 41 54 66 79 91 106 121 137 154 168 184 199 212 228 243 257 269 283 295 308 319 "
    "329 340 351 361 372 382 393 404 415 426 437 451 463 474 488 501 512 526 538 553 568 584 "
    "598 613 628 643 660 680 700 721 744 769 793 818 844 871 898 927 955 985 1024"
)


def gamma(mean: float, std: float) -> Draw:
    """Draws gamma lengths by their own mean and standard deviation."""
    shape = (mean / std) ** 2
    scale = mean / shape
    return lambda rng: max(1, round(rng.gammavariate(shape, scale)))


def lognormal_by_quantiles(p50: float, p90: float) -> Draw:
    """Draws lognormal lengths by median and 90th percentile."""
    mu, sigma = math.log(p50), math.log(p90 / p50) / _UNIT.inv_cdf(0.9)
    return lambda rng: max(1, round(rng.lognormvariate(mu, sigma)))


def log_uniform(low: int, high: int) -> Draw:
    """Draws lengths whose logarithm is uniform between `low` and `high`."""
    start, width = math.log(low), math.log(high / low)
    return lambda rng: round(math.exp(start + width * rng.random()))


def truncated_lognormal(low: int, high: int, mean: float) -> Draw:
    """Draws lognormal lengths cut to `low`..`high`, with `mean` as their mean after the cut.

    Three figures don't determine a shape. Assumption: `low` and `high` lie six standard deviations
    of the logarithm apart, as the extremes of some hundred samples do; the location then follows
    from the mean. Raises ConfigError when `mean` is not well inside the range.
    """
    sigma = math.log(high / low) / 6
    bottom, top = math.log(low) - 3 * sigma, math.log(high) + 3 * sigma
    if not low < mean < high or not (
        _cut_mean(bottom, sigma, low, high) < mean < _cut_mean(top, sigma, low, high)
    ):
        raise ConfigError(f"mean length {mean:g}: it must be well inside {low}..{high} tokens")
    for _ in range(60):
        mu = (bottom + top) / 2
        if _cut_mean(mu, sigma, low, high) < mean:
            bottom = mu
        else:
            top = mu
    shape = NormalDist(mu, sigma)
    start = shape.cdf(math.log(low))
    width = shape.cdf(math.log(high)) - start

    def draw(rng: random.Random) -> int:
        share = start + width * rng.random()
        return min(high, max(low, round(math.exp(shape.inv_cdf(share)))))

    return draw


def _cut_mean(mu: float, sigma: float, low: int, high: int) -> float:
    """Returns the mean of a lognormal that is cut to `low`..`high`."""
    a, b = (math.log(low) - mu) / sigma, (math.log(high) - mu) / sigma
    inside = _UNIT.cdf(b) - _UNIT.cdf(a)
    return math.exp(mu + sigma**2 / 2) * (_UNIT.cdf(b - sigma) - _UNIT.cdf(a - sigma)) / inside


def by_quantiles(table: Sequence[int]) -> Draw:
    """Draws lengths by evenly spaced quantiles, minimum and maximum included, linear in between."""
    steps = len(table) - 1

    def draw(rng: random.Random) -> int:
        place = rng.random() * steps
        index = int(place)
        return max(1, round(table[index] + (table[index + 1] - table[index]) * (place - index)))

    return draw


def mixture(weights: Sequence[float]) -> Draw:
    """Draws the index of one of several alternatives, by weight."""
    total = sum(weights)
    bounds = [sum(weights[: i + 1]) / total for i in range(len(weights) - 1)]
    return lambda rng: bisect_right(bounds, rng.random())
