"""The expected work against sums over the arrivals themselves."""

from __future__ import annotations

import random

import pytest

from millrace.core.priority.millrace.forecast import REFRESH, WINDOW, Forecast


def steady(gap_s: float, work: float, objective_s: float, density: float, count: int) -> Forecast:
    forecast = Forecast()
    for number in range(count):
        forecast.arrived(number * gap_s, work, objective_s, density)
    return forecast


def test_a_steady_stream_goes_on_at_its_rate() -> None:
    forecast = steady(0.1, 0.05, 1.0, 1.0, 64 * REFRESH)
    for until_s in (2.0, 5.0, 10.0):
        # Half a second of work a second, of those that arrive until a second before.
        expected = 0.5 * (until_s - 1.0)
        assert forecast.work(forecast.row(1.0), until_s) == pytest.approx(expected, rel=0.02)
    assert forecast.work(forecast.row(1.0), 0.5) == 0.0  # none of them would be due by then


def test_work_of_higher_density_does_not_count() -> None:
    forecast = steady(0.1, 0.05, 1.0, 8.0, 4 * REFRESH)
    assert forecast.work(forecast.row(1.0), 3.0) == 0.0
    assert forecast.work(forecast.row(8.0), 3.0) > 0.0


def test_nothing_is_expected_beyond_half_of_what_was_seen() -> None:
    forecast = steady(0.1, 0.05, 0.5, 1.0, 2 * REFRESH)  # 3.1 s
    row = forecast.row(1.0)
    assert forecast.work(row, 100.0) == forecast.work(row, 50.0) <= 0.5 * 1.6


def test_nothing_is_expected_at_first_nor_of_requests_that_came_at_once() -> None:
    assert Forecast().work(Forecast().row(1.0), 10.0) == 0.0
    at_once = steady(0.0, 1.0, 1.0, 1.0, 4 * REFRESH)
    assert at_once.work(at_once.row(1.0), 10.0) == 0.0


def test_mixed_arrivals_add_up() -> None:
    rng, forecast, seen = random.Random(3), Forecast(), []
    for number in range(20 * REFRESH):
        row = (rng.uniform(0.1, 2.0), rng.choice([0.5, 2.0, 8.0]), rng.choice([0.1, 1.0, 10.0]))
        forecast.arrived(number * 0.5, *row)
        seen.append(row)
    span_s = 0.5 * len(seen)
    for density in (0.1, 1.0, 10.0):
        for until_s in (1.0, 5.0, 30.0):
            expected = sum(
                work * max(0.0, until_s - objective_s) / span_s
                for work, objective_s, its in seen
                if its <= density
            )
            found = forecast.work(forecast.row(density), until_s)
            assert found == pytest.approx(expected, rel=0.25, abs=0.05)


def test_the_usual_objective_is_the_geometric_mean_of_the_last() -> None:
    forecast = Forecast()
    assert forecast.usual_objective_s == 0.0
    for objective_s in (1.0, 4.0, 16.0):
        forecast.arrived(0.0, 1.0, objective_s, 1.0)
    assert forecast.usual_objective_s == pytest.approx(4.0)
    for number in range(10 * WINDOW):
        forecast.arrived(float(number), 1.0, 0.5, 1.0)
    assert forecast.usual_objective_s == pytest.approx(0.5, rel=0.01)


def test_sums_stay_finite_over_very_many_arrivals() -> None:
    forecast = steady(0.1, 0.05, 1.0, 1.0, 20_000)
    assert forecast.work(forecast.row(1.0), 5.0) == pytest.approx(2.0, rel=0.02)
