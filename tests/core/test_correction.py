"""Online correction: convergence, outliers, bounds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.correction import CorrectionConfig, Corrections
from millrace.core.errors import ConfigError


def observe(corrections, *ratios):
    for ratio in ratios:
        corrections.observe("p0", predicted_s=0.5, observed_s=0.5 * ratio)
    return corrections.factor("p0")


def test_an_instance_without_observations_is_taken_at_its_word():
    assert Corrections().factor("p0") == 1.0


def test_one_observation_counts_by_its_weight():
    assert observe(Corrections(CorrectionConfig(weight=0.5)), 2.0) == pytest.approx(2.0**0.5)


@given(st.floats(1 / 2.9, 2.9), st.floats(0.001, 0.5), st.floats(0.05, 1.0))
def test_it_converges_within_the_stated_observations(ratio, error, weight):
    config = CorrectionConfig(weight=weight)
    needed = config.observations_to(error)
    factor = observe(Corrections(config), *[ratio] * needed)
    assert max(factor / ratio, ratio / factor) <= (1 + error) * (1 + 1e-9)


def test_the_default_is_within_five_percent_after_fourteen_observations():
    assert CorrectionConfig().observations_to(0.05) == 14


def test_a_machine_half_as_fast_is_predicted_within_fifteen_percent_after_eight():
    corrections = Corrections()
    observe(corrections, *[2.0] * 8)
    assert corrections.factor("p0") * 0.5 == pytest.approx(1.0, rel=0.15)


def test_outliers_change_nothing():
    corrections = Corrections()
    before = observe(corrections, 1.5, 1.5)
    assert observe(corrections, 100.0, 0.01, 100.0, 100.0, 100.0, 100.0) == before


def test_outliers_that_persist_on_one_side_are_believed():
    corrections = Corrections(CorrectionConfig(persistent=3))
    assert observe(corrections, 5.0, 5.0) == 1.0
    assert observe(corrections, 5.0) == 5.0


def test_a_usual_observation_ends_a_run_of_outliers():
    corrections = Corrections(CorrectionConfig(persistent=3))
    assert observe(corrections, 5.0, 5.0, 1.0, 5.0, 5.0) == 1.0


@given(st.lists(st.floats(1e-6, 1e6), max_size=40))
def test_it_stays_within_its_bounds(ratios):
    config = CorrectionConfig()
    factor = observe(Corrections(config), *ratios)
    assert config.least * (1 - 1e-9) <= factor <= config.most * (1 + 1e-9)


def test_instances_are_apart_and_can_be_forgotten():
    corrections = Corrections()
    observe(corrections, 2.0)
    assert corrections.factor("p1") == 1.0
    corrections.forget("p0")
    assert corrections.factor("p0") == 1.0


@pytest.mark.parametrize("times", [(0.0, 1.0), (1.0, 0.0), (1.0, float("nan")), (-1.0, 1.0)])
def test_times_that_say_nothing_are_ignored(times):
    corrections = Corrections()
    corrections.observe("p0", predicted_s=times[0], observed_s=times[1])
    assert corrections.factor("p0") == 1.0


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"weight": 0.0}, "weight"),
        ({"weight": 1.1}, "weight"),
        ({"least": 2.0}, "least"),
        ({"most": 0.5}, "most"),
        ({"outlier": 1.0}, "outlier"),
        ({"persistent": 0}, "persistent"),
    ],
)
def test_bad_settings_are_named(fields, name):
    with pytest.raises(ConfigError, match=name):
        CorrectionConfig(**fields)
