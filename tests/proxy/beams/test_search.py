"""A beam search over a known law of tokens."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from itertools import product

import pytest

from millrace.core.token_events import PositionLogprobs
from millrace.proxy.beams.search import Beam, BeamSearch

VOCABULARY, STOP, PROMPT_TOKENS = 6, 5, 3
Law = Callable[[Sequence[int]], list[float]]


def law(seed: int, *, peaked: float = 1.0) -> Law:
    """Log probabilities of each token after others; the same after the same."""

    def logprobs(before: Sequence[int]) -> list[float]:
        rng = random.Random(f"{seed} {tuple(before)}")
        weights = [math.exp(peaked * rng.gauss(0, 1)) for _ in range(VOCABULARY)]
        return [math.log(weight / sum(weights)) for weight in weights]

    return logprobs


def step(search: BeamSearch, of: Law) -> None:
    found = []
    for beam in search.open:
        ranked = sorted(enumerate(of(beam.token_ids)), key=lambda one: -one[1])
        found.append(PositionLogprobs(ranked[0], ranked))
    search.extend(found)


def searched(
    of: Law, width: int, tokens: int, penalty: float = 1.0, stops: tuple[int, ...] = ()
) -> list[Beam]:
    search = BeamSearch(PROMPT_TOKENS, width, tokens, stops, penalty)
    while search.open:
        step(search, of)
    return search.best()


def every_answer(of: Law, tokens: int, penalty: float, *, stops: bool) -> list[tuple[float, list]]:
    """All answers of at most so many tokens with their scores, the best first."""
    found = []
    for length in range(1, tokens + 1):
        for ids in product(range(VOCABULARY), repeat=length):
            stopped = stops and ids[-1] == STOP
            if (stops and STOP in ids[:-1]) or (length < tokens and not stopped):
                continue
            logprob = sum(of(ids[:i])[token_id] for i, token_id in enumerate(ids))
            score = logprob / (PROMPT_TOKENS + length - stopped) ** penalty
            found.append((score, list(ids)))
    return sorted(found, reverse=True)


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0, 2.0])
@pytest.mark.parametrize("stops", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_search_that_drops_nothing_finds_the_best_answers(seed, stops, penalty) -> None:
    of, tokens = law(seed), 3
    width = VOCABULARY ** (tokens - 1)
    found = searched(of, width, tokens, penalty, (STOP,) if stops else ())
    best = every_answer(of, tokens, penalty, stops=stops)[:width]
    assert [beam.token_ids for beam in found] == [ids for _, ids in best]
    for beam in found:
        assert beam.logprob == pytest.approx(sum(one.chosen[1] for one in beam.positions))
        assert (beam.stop_token_id == STOP) == (stops and beam.token_ids[-1] == STOP)


def searched_to_the_last_token(of: Law, width: int, tokens: int, penalty: float) -> list[list[int]]:
    """The answers of a search that does not end early."""
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float]] = []
    for _ in range(tokens):
        longer = [
            ([*ids, token_id], logprob + more)
            for ids, logprob in beams
            for token_id, more in enumerate(of(ids))
        ]
        ended += [one for one in longer if one[0][-1] == STOP]
        going = sorted((one for one in longer if one[0][-1] != STOP), key=lambda one: -one[1])
        beams = going[:width]

    def score(one: tuple[list[int], float]) -> float:
        ids, logprob = one
        return logprob / (PROMPT_TOKENS + len(ids) - (ids[-1] == STOP)) ** penalty

    return [ids for ids, _ in sorted([*ended, *beams], key=score, reverse=True)[:width]]


@pytest.mark.parametrize("seed", range(40))
def test_it_ends_early_only_when_nothing_can_change(seed) -> None:
    of, penalty = law(seed, peaked=3.0), random.Random(seed).uniform(-2, 2)
    found = searched(of, 3, 8, penalty, (STOP,))
    assert [beam.token_ids for beam in found] == searched_to_the_last_token(of, 3, 8, penalty)


def test_a_decided_search_asks_no_more() -> None:
    sure = [math.log(one) for one in (0.01, 0.01, 0.005, 0.0025, 0.0025, 0.97)]
    search = BeamSearch(PROMPT_TOKENS, 1, 100, (STOP,), 1.0)
    step(search, lambda before: sure)
    assert not search.open
    assert [beam.token_ids for beam in search.best()] == [[STOP]]


def test_a_width_of_one_is_greedy() -> None:
    of, ids = law(3), []
    for _ in range(7):
        ids.append(max(range(VOCABULARY), key=of(ids).__getitem__))
    assert [beam.token_ids for beam in searched(of, 1, 7)] == [ids]
