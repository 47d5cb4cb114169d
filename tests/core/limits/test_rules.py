"""Meters: buckets that refill, budgets of a day, reservations and corrections."""

from __future__ import annotations

import random

import pytest

from millrace.core.limits.rules import (
    DAY_MS,
    MINUTE_MS,
    Charge,
    Cost,
    Limits,
    Meter,
    TooLarge,
    charges,
    corrections,
    level_of,
)

NOON = 20_000 * DAY_MS + DAY_MS // 2


def requests(limit: int, amount: int = 1) -> Charge:
    return Charge(meter="requests_per_minute", limit=limit, amount=amount)


def a_day(limit: int, amount: int) -> Charge:
    return Charge(meter="tokens_per_day", limit=limit, amount=amount)


def take(meter: Meter, charge: Charge, now_ms: int) -> bool:
    if meter.wait_ms(charge, now_ms):
        return False
    meter.add(charge, now_ms)
    return True


def test_a_full_bucket_gives_its_limit_at_once_and_then_evenly():
    meter, charge = Meter(), requests(60)
    assert sum(take(meter, charge, NOON) for _ in range(100)) == 60
    assert meter.wait_ms(charge, NOON) == 1000
    assert not take(meter, charge, NOON + 999)
    assert take(meter, charge, NOON + 1000)
    assert not take(meter, charge, NOON + 1000)


@pytest.mark.parametrize("limit", [1, 7, 60, 999, 10**6])
def test_a_client_that_waits_as_told_is_admitted_and_a_millisecond_earlier_is_not(limit):
    meter, charge, now = Meter(), requests(limit), NOON
    rng = random.Random(limit)
    for _ in range(500):
        charge = requests(limit, rng.randint(1, limit))
        if wait_ms := meter.wait_ms(charge, now):
            assert meter.wait_ms(charge, now + wait_ms - 1) > 0
            now += wait_ms
        assert take(meter, charge, now)
        now += rng.randint(0, 100)


def test_no_window_gets_more_than_its_burst_and_its_refill():
    rng = random.Random(1)
    for limit in (10, 333):
        meter, now, admitted = Meter(), NOON, []
        for _ in range(4000):
            now += rng.randint(0, 400)
            if take(meter, requests(limit), now):
                admitted.append(now)
        for first in range(0, len(admitted), 7):
            for last in range(first, len(admitted), 13):
                window_ms = admitted[last] - admitted[first]
                assert (last - first + 1 - limit) * MINUTE_MS <= limit * window_ms


def test_an_idle_bucket_is_full_and_no_fuller():
    meter = Meter()
    assert take(meter, requests(10, 10), NOON)
    later = NOON + 400 * DAY_MS
    assert take(meter, requests(10, 10), later)
    assert not take(meter, requests(10), later)


def test_a_clock_that_goes_back_refills_nothing():
    meter = Meter()
    assert take(meter, requests(10, 10), NOON)
    assert not take(meter, requests(10), NOON - 60_000)
    meter.add(requests(10, -10), NOON - 60_000)
    assert take(meter, requests(10, 10), NOON)


def test_a_budget_lasts_until_midnight():
    meter = Meter()
    assert take(meter, a_day(100, 60), NOON)
    assert meter.wait_ms(a_day(100, 41), NOON) == DAY_MS // 2
    assert take(meter, a_day(100, 40), NOON + DAY_MS // 2 - 1)
    assert not take(meter, a_day(100, 1), NOON + DAY_MS // 2 - 1)
    assert take(meter, a_day(100, 100), NOON + DAY_MS // 2)


def test_what_is_given_back_on_the_next_day_changes_nothing():
    meter = Meter()
    assert take(meter, a_day(100, 100), NOON)
    meter.add(a_day(100, -70), NOON + DAY_MS)
    assert take(meter, a_day(100, 100), NOON + DAY_MS)


def test_every_limit_charges_what_it_counts():
    limits = Limits(
        requests_per_minute=5,
        tokens_per_minute=1000,
        prompt_tokens_per_minute=500,
        generated_tokens_per_minute=400,
        tokens_per_day=10_000,
        concurrency=2,
    )
    found = charges(limits, Cost(prompt_tokens=30, generated_tokens=70))
    assert isinstance(found, list)
    assert {c.meter: c.amount for c in found} == {
        "requests_per_minute": 1,
        "tokens_per_minute": 100,
        "prompt_tokens_per_minute": 30,
        "generated_tokens_per_minute": 70,
        "tokens_per_day": 100,
    }
    fixed = corrections(found, Cost(prompt_tokens=30, generated_tokens=8))
    assert {c.meter: c.amount for c in fixed} == {
        "tokens_per_minute": -62,
        "prompt_tokens_per_minute": 0,
        "generated_tokens_per_minute": -62,
        "tokens_per_day": -62,
    }


def test_without_limits_nothing_is_charged():
    assert charges(Limits(), Cost(prompt_tokens=5, generated_tokens=5)) == []
    assert not Limits().any and Limits(concurrency=1).any


@pytest.mark.parametrize(
    ("limits", "cost", "meter"),
    [
        (Limits(tokens_per_minute=100), Cost(prompt_tokens=101, generated_tokens=0), "tokens_"),
        (Limits(prompt_tokens_per_minute=9), Cost(prompt_tokens=10, generated_tokens=0), "prompt"),
        (Limits(tokens_per_day=100), Cost(prompt_tokens=50, generated_tokens=51), "tokens_per_day"),
    ],
)
def test_what_never_fits_is_too_large(limits, cost, meter):
    found = charges(limits, cost)
    assert isinstance(found, TooLarge) and found.meter.startswith(meter)


def test_a_full_bucket_lends_to_a_reservation_that_is_larger_and_gets_it_back():
    limits = Limits(tokens_per_minute=100)
    found = charges(limits, Cost(prompt_tokens=50, generated_tokens=4096))
    assert isinstance(found, list) and found[0].amount == 100
    meter = Meter()
    assert take(meter, found[0], NOON)
    [fixed] = corrections(found, Cost(prompt_tokens=50, generated_tokens=250))
    meter.add(fixed, NOON)
    one = Charge(meter="tokens_per_minute", limit=100, amount=1)
    assert level_of(one, meter.level_at(one, NOON), NOON).left == 0
    assert meter.wait_ms(one, NOON) == 2 * MINUTE_MS + MINUTE_MS // 100


def test_a_level_is_rounded_against_the_client():
    charge = requests(60)
    level = level_of(charge, 59 * MINUTE_MS + 1, NOON)
    assert (level.used, level.left, level.reset_ms) == (60, 0, 59_001)
    day = level_of(a_day(100, 0), 40, NOON)
    assert (day.used, day.left, day.reset_ms) == (40, 60, DAY_MS // 2)
