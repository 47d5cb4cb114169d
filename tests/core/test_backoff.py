"""Pauses between attempts grow, stay within their bounds and differ."""

from __future__ import annotations

from random import Random

import pytest

from millrace.core.backoff import Backoff


def test_pauses_double_up_to_their_limit():
    retry = Backoff(0.5, 6.0, spread=0.0)
    assert [retry.pause_s(earlier) for earlier in range(6)] == [0.5, 1.0, 2.0, 4.0, 6.0, 6.0]
    assert retry.pause_s(1_000_000) == 6.0


def test_after_a_success_they_begin_again():
    retry = Backoff(0.1, 1.0, spread=0.0)
    assert [retry.pause_s(earlier) for earlier in (0, 1, 0, 1)] == [0.1, 0.2, 0.1, 0.2]


@pytest.mark.parametrize(("drawn", "seconds"), [(0.0, 0.14), (0.5, 0.2), (1.0, 0.26)])
def test_the_spread_is_around_the_length(drawn: float, seconds: float):
    assert Backoff(0.1, 1.0, draw=lambda: drawn).pause_s(1) == pytest.approx(seconds)


def test_drawn_pauses_differ_within_their_bounds():
    retry = Backoff(1.0, 8.0, spread=0.25, draw=Random(3).random)
    first = [retry.pause_s(0) for _ in range(1000)]
    last = [retry.pause_s(9) for _ in range(1000)]
    assert 0.75 <= min(first) < 0.76 and 1.24 < max(first) <= 1.25
    assert 6.0 <= min(last) < 6.1 and 9.9 < max(last) <= 10.0


def test_the_same_seed_gives_the_same_pauses():
    def pauses(seed: int) -> list[float]:
        retry = Backoff(0.1, 1.0, draw=Random(seed).random)
        return [retry.pause_s(earlier) for earlier in range(8)]

    assert pauses(1) == pauses(1) != pauses(2)


def test_two_processes_pause_differently():
    """Without a seed: that is what the draw is for."""
    assert len({Backoff(0.1, 1.0).pause_s(0) for _ in range(100)}) > 1


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((-1.0, 1.0), r"first_s is -1.0 and most_s is 1.0; 0 <= first_s <= most_s must hold"),
        ((2.0, 1.0), r"first_s is 2.0 and most_s is 1.0"),
        ((1.0, 2.0, 1.5), r"spread is 1.5; it must be in \[0, 1\]"),
    ],
)
def test_values_out_of_range_are_refused(values: tuple[float, ...], message: str):
    with pytest.raises(ValueError, match=message):
        Backoff(*values)
