"""Computes a load that no order can exceed, by a linear relaxation of the offline problem.

All arrivals are known. Prompt j arrives at r, has its deadline at d, and takes at least the work w
of `least_work` (seconds times instances). The pool of m instances computes any amounts of any
prompts at once and switches at no cost. A share x of a prompt may be computed, and counts as x of a
request. Such shares can be in time if and only if, for all times s < e,

    sum of x w over the prompts with s <= r and d <= e    <=    m (e - s)

A real run is one solution of this: x = 1 for each request that is in time. So no run is above the
bound. TBT objectives are ignored, which can only raise the bound.

The amounts x w that can be in time are a polymatroid. Where each prompt has a price, the greedy
rule is therefore optimal: prompts are taken by deadline, and where an interval is full the work
with the least price per instance-second leaves. For the worst of several groups (classes, length
bands), prices of groups play against shares: any prices prove a bound, and an average of greedy
shares reaches it. A game that stays undecided counts as carried, so the bound holds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from millrace.experiments.joined.goodputs import CRITERIA, GOAL, REACH, STEP, Places, groups_of
from millrace.experiments.joined.least_work import LeastWork
from millrace.sim.scenario import Scenario

Floats = npt.NDArray[np.float64]

#: Shares that miss the goal by less than this share of it reach it, and an interval holds so many
#: instance-seconds more than it has: numbers are rounded.
ROUNDING, ROUNDING_S = 1e-6, 1e-9
#: Greedy shares that a game tries, and steps between two of them.
ANSWERS, GAME_STEPS = 60, 300


class Offline:
    """The prompts of a run on a pool of `instances`.

    releases_s, deadlines_s: when prompts arrive, ascending, and when they are due, on one clock.
    works: their instance-seconds, above 0.
    """

    def __init__(
        self, releases_s: Floats, deadlines_s: Floats, works: Floats, instances: float
    ) -> None:
        self._releases_s = releases_s
        self._deadlines_s = deadlines_s
        self._works = works
        self._instances = instances
        self._by_deadline = np.argsort(deadlines_s, kind="stable")

    def best_shares(self, prices: Floats) -> Floats:
        """Returns shares, 0 to 1, that can be in time together and are worth most.

        A prompt's whole share is worth its price; one with the price 0 gets no share.
        """
        done = np.zeros_like(self._works)
        each = prices / self._works
        # Free instance-seconds from each release to the deadline at hand, less that deadline's.
        free = -self._instances * self._releases_s
        held = np.full_like(each, np.inf)  # `each` of the work that is done
        for at in map(int, self._by_deadline):
            if each[at] > 0.0:
                self._admit(at, done, each, held, free)
        return done / self._works

    def _admit(self, at: int, done: Floats, each: Floats, held: Floats, free: Floats) -> None:
        """Does as much of a prompt as is worth it. No deadline so far is later than its own."""
        full = -self._instances * self._deadlines_s[at] - ROUNDING_S
        around = free[: at + 1]  # of the intervals that hold this prompt
        left = float(self._works[at])
        while left > 1e-12:
            room = float(around.min()) - full
            if room > ROUNDING_S / 2:
                other, moved = at, min(left, room)
            else:
                # In the shortest interval that is full, the work that is worth least gives way.
                shortest = at - int(np.argmax(around[::-1] <= full + ROUNDING_S / 2))
                other = shortest + int(np.argmin(held[shortest:]))
                if held[other] >= each[at]:
                    return
                moved = min(left, float(done[other]))
                if other < at:
                    moved = min(moved, float(free[other + 1 : at + 1].min()) - full)
                done[other] -= moved
                free[: other + 1] += moved
                if done[other] <= 1e-12:
                    held[other] = np.inf
            done[at] += moved
            held[at] = each[at]
            around -= moved
            left -= moved


def carries(offline: Offline, groups: Sequence[Places], goal: float = GOAL) -> bool:
    """Returns whether the share `goal` of each group may be in time; False is a proof.

    A group is the places of its prompts. A run has a whole number of them in time, so it needs the
    first whole number that reaches the goal.
    """
    prompts = max(int(group.max()) for group in groups) + 1
    worth = np.zeros((len(groups), prompts))
    for row, group in zip(worth, groups, strict=True):
        row[group] = 1.0 / math.ceil(goal * len(group) - 1e-9)
    prices = np.full(len(groups), 1.0 / len(groups))
    answers: list[Floats] = []
    while len(answers) < ANSWERS:
        answer = worth @ offline.best_shares(prices @ worth)
        if prices @ answer < 1.0 - ROUNDING:
            return False
        answers.append(answer)
        least = float(answer.min())
        if least < 1.0 - ROUNDING:
            prices, least = _play(np.array(answers))
        if least >= 1.0 - ROUNDING:
            return True
    return True


def _play(answers: Floats) -> tuple[Floats, float]:
    """Plays prices of groups against averages of the answers, by regret matching.

    Returns the prices that leave the best answer the least worth, and what the worst group has of
    its goal in the best average; both are approximate.
    """
    count, groups = answers.shape
    for_answers, for_prices = np.zeros(count), np.zeros(groups)
    answers_so_far, prices_so_far = np.zeros(count), np.zeros(groups)
    for step in range(1, GAME_STEPS + 1):
        mix, prices = _matched(for_answers), _matched(for_prices)
        worth, reached = answers @ prices, mix @ answers
        value = float(mix @ worth)
        for_answers = np.maximum(for_answers + worth - value, 0.0)
        for_prices = np.maximum(for_prices + value - reached, 0.0)
        answers_so_far += step * mix
        prices_so_far += step * prices
    least = float((answers_so_far @ answers).min() / answers_so_far.sum())
    return prices_so_far / prices_so_far.sum(), least


def _matched(regrets: Floats) -> Floats:
    total = regrets.sum()
    if total > 0.0:
        return np.asarray(regrets / total)
    return np.full(len(regrets), 1.0 / len(regrets))


class Relaxation:
    """A scenario's relaxation at any load.

    Its cluster has a prefill pool of a fixed size, and work takes the predicted times (no noise).
    """

    def __init__(self, scenario: Scenario) -> None:
        self._scenario = scenario
        self._work = LeastWork(scenario.spec)
        self._known: dict[float, tuple[Offline, Mapping[str, Sequence[Places]]]] = {}

    def carries(self, load: float, criterion: str, goal: float = GOAL) -> bool:
        """Returns whether a run may have the share `goal` in time by a criterion of `goodputs`."""
        offline, groups = self.at(load)
        return carries(offline, groups[criterion], goal)

    def at(self, load: float) -> tuple[Offline, Mapping[str, Sequence[Places]]]:
        """Returns the prompts at a load, in order of arrival, and their groups by criterion."""
        if load not in self._known:
            requests = list(self._scenario.at_load(load).requests())
            releases_s = np.array([one.arrival_s for one in requests])
            objectives_s = np.array([one.slo.ttft_s or math.inf for one in requests])
            works = np.array([self._work.at(one.input_tokens) for one in requests])
            instances = self._scenario.spec.prefill
            offline = Offline(releases_s, releases_s + objectives_s, works, instances)
            self._known[load] = offline, groups_of(requests)
        return self._known[load]


def bounds(scenario: Scenario, start: float) -> dict[str, float]:
    """Returns by criterion the largest load of the grid of `goodputs` that a run may carry.

    0 where none in reach is carried, the last in reach where all are. Bisection is exact: arrivals
    that lie closer together leave every set of prompts at most as much time.
    """
    relaxation = Relaxation(scenario)
    found, first = {}, 0
    for criterion in CRITERIA:
        low, high, stride, at = -REACH, REACH, 4, first
        while high - low > 1:
            if relaxation.carries(start * STEP**at, criterion):
                low, at = at, min(at + stride, (at + high) // 2)
            else:
                high, at = at, max(at - stride, (at + low) // 2)
            stride *= 2
        found[criterion] = start * STEP**low if low > -REACH else 0.0
        first = low if low > -REACH else 0
    return found
