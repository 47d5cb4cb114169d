"""Online correction: convergence, errors of an instance against errors of a band, outliers."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.cost.correction import Band, CorrectionConfig, Corrections, OnTop, band_of
from millrace.core.errors import ConfigError

SHORT, MIDDLE, LONG = band_of(100), band_of(4000), band_of(100_000)


def observe(corrections: Corrections, *ratios: float, band: Band = SHORT) -> float:
    for ratio in ratios:
        corrections.observe("p0", band, predicted_s=0.5, observed_s=0.5 * ratio)
    return factor(corrections, band)


def factor(corrections: Corrections, band: Band, instance_id: str = "p0") -> float:
    """The factor of work of half a second by the profile: so long that overhead is negligible."""
    return corrections.seconds(instance_id, band, 0.5) / 0.5


def test_bands_are_octaves_of_the_last_token_by_degree():
    assert band_of(1024) == band_of(2047) != band_of(2048)
    assert band_of(1024, 2) != band_of(1024)


def test_an_instance_without_observations_is_taken_at_its_word():
    assert factor(Corrections(), SHORT) == 1.0


def test_the_first_observation_is_mostly_believed():
    assert 1.6 < observe(Corrections(), 2.0) < 2.0


@given(st.floats(1 / 2.9, 2.9), st.sampled_from([SHORT, LONG]))
def test_it_converges(ratio, band):
    assert observe(Corrections(), *[ratio] * 5, band=band) == pytest.approx(ratio, rel=0.02)


def test_a_busy_machine_is_learned_from_short_prompts_for_long_ones():
    corrections = Corrections()
    observe(corrections, *[2.0] * 8)
    assert factor(corrections, LONG) == pytest.approx(2.0, rel=0.2)


def test_what_is_off_in_one_band_stays_there():
    """The profile is right for short prompts, and half of the true time for long prompts."""
    corrections = Corrections()
    for _ in range(20):
        observe(corrections, 1.0, 1.0, 1.0)
        observe(corrections, 2.0, band=LONG)
    assert factor(corrections, SHORT) == pytest.approx(1.0, rel=0.1)
    assert factor(corrections, LONG) == pytest.approx(2.0, rel=0.1)
    middle = factor(corrections, MIDDLE)  # of which nothing is known
    assert 0.9 < middle < 1.5
    assert factor(corrections, band_of(200_000)) > 1.3  # near what is known


def test_a_machine_that_slows_down_is_followed_in_all_bands():
    corrections = Corrections()
    for _ in range(20):
        observe(corrections, 1.0)
        observe(corrections, 1.5, band=LONG)
    observe(corrections, *[2.0] * 12)
    assert factor(corrections, LONG) > 2.2  # 3 when all of it is the machine's


def test_noise_is_smoothed():
    corrections = Corrections()
    for _ in range(20):
        observe(corrections, 0.8, 1.25)
    assert factor(corrections, SHORT) == pytest.approx(1.0, rel=0.1)


def test_what_every_short_pass_costs_on_top_is_no_busy_machine():
    corrections = Corrections()
    for _ in range(30):
        corrections.observe("p0", SHORT, predicted_s=0.002, observed_s=0.005)
        corrections.observe("p0", MIDDLE, predicted_s=0.2, observed_s=0.203)
    assert corrections.seconds("p0", SHORT, 0.002) == pytest.approx(0.005, rel=0.1)
    assert corrections.seconds("p0", band_of(1), 0.001) == pytest.approx(0.004, rel=0.2)
    assert factor(corrections, MIDDLE) == pytest.approx(1.015, rel=0.1)
    assert factor(corrections, LONG) == pytest.approx(1.0, rel=0.15)


def test_noise_of_a_few_short_passes_is_not_drawn_on_to_long_ones():
    for seed in range(50):
        draw, corrections = Random(seed), Corrections()
        for _ in range(3):
            ratio = 2.5 * draw.uniform(0.7, 1.4)
            corrections.observe("p0", SHORT, predicted_s=2e-3, observed_s=2e-3 * ratio)
        assert factor(corrections, LONG) == pytest.approx(1.0, abs=0.3)


def test_early_and_late_pieces_count_alike():
    corrections = Corrections()
    for _ in range(100):
        for observed_s in (5e-3 * 1.5, 5e-3 / 1.5):
            corrections.observe("p0", SHORT, predicted_s=1e-3, observed_s=observed_s)
    assert corrections.seconds("p0", SHORT, 1e-3) == pytest.approx(5e-3, rel=0.15)


def test_outliers_change_nothing():
    corrections = Corrections()
    before = observe(corrections, 1.5, 1.5)
    assert observe(corrections, 100.0, 0.01, 100.0, 100.0, 100.0, 100.0) == before


def test_an_overhead_of_many_times_the_predicted_time_is_learned_whole():
    """A pass of a fast device: 0.2 ms by the profile, 4 ms with its messages."""
    corrections = Corrections()
    for _ in range(20):
        corrections.observe("p0", SHORT, predicted_s=2e-4, observed_s=4e-3)
        corrections.observe("p0", LONG, predicted_s=0.5, observed_s=0.504)
    assert corrections.seconds("p0", SHORT, 2e-4) == pytest.approx(4e-3, rel=0.1)
    assert corrections.seconds("p0", LONG, 0.5) == pytest.approx(0.504, rel=0.02)


def test_outliers_that_persist_on_one_side_are_believed():
    corrections = Corrections(CorrectionConfig(persistent=3))
    assert observe(corrections, 1.0, 1.0, 1.0, 5.0, 5.0) == pytest.approx(1.0)
    assert observe(corrections, 5.0) == pytest.approx(5.0, rel=0.1)
    assert factor(corrections, LONG) == pytest.approx(5.0, rel=0.1)  # it is the machine


def test_outliers_of_one_band_that_persist_between_usual_ones_are_the_band_s():
    corrections = Corrections(CorrectionConfig(persistent=3))
    for _ in range(3):
        observe(corrections, 1.0, 1.0)
        observe(corrections, 6.0, band=LONG)
    assert factor(corrections, LONG) == pytest.approx(6.0, rel=0.1)
    assert factor(corrections, SHORT) == pytest.approx(1.0, rel=0.1)


def test_a_usual_observation_ends_a_run_of_outliers():
    corrections = Corrections(CorrectionConfig(persistent=3))
    seen = observe(corrections, 1.0, 1.0, 1.0, 5.0, 5.0, 1.0, 5.0, 5.0)
    assert seen == pytest.approx(1.0)


@given(st.lists(st.tuples(st.floats(1e-6, 1e6), st.sampled_from([SHORT, LONG])), max_size=40))
def test_the_factor_stays_finite_whatever_is_seen(seen):
    config = CorrectionConfig()
    corrections = Corrections(config)
    for ratio, band in seen:
        factor = observe(corrections, ratio, band=band)
        assert config.least / config.outlier**2 <= factor <= config.most * config.outlier**2


def test_instances_are_apart_and_forgotten():
    corrections = Corrections()
    observe(corrections, 2.0)
    assert factor(corrections, SHORT, "p1") == 1.0
    corrections.forget("p0")
    assert factor(corrections, SHORT) == 1.0


@pytest.mark.parametrize("times", [(0.0, 1.0), (1.0, 0.0), (float("nan"), 1.0), (1.0, -1.0)])
def test_times_that_say_nothing_are_ignored(times):
    corrections = Corrections()
    corrections.observe("p0", SHORT, predicted_s=times[0], observed_s=times[1])
    assert factor(corrections, SHORT) == 1.0


@pytest.mark.parametrize(
    "fields",
    [
        {"noise": 0.0},
        {"instance": float("inf")},
        {"band": -1.0},
        {"overhead_s": 0.0},
        {"jitter_s": 0.0},
        {"drift": float("nan")},
        {"least": 0.0},
        {"least": 1.5},
        {"most": 0.5},
        {"most": float("inf")},
        {"outlier": 1.0},
        {"persistent": 0},
    ],
)
def test_settings_out_of_range_are_refused_by_name(fields):
    with pytest.raises(ConfigError, match=next(iter(fields))):
        CorrectionConfig(**fields)


def test_what_comes_on_top_is_typical_and_no_single_one_throws_it():
    on_top = OnTop()
    assert on_top.seconds(16) == 0.0
    on_top.observe(16, 0.07)  # it connected
    for _ in range(4):
        on_top.observe(16, 0.004)
    on_top.observe(16, 10.0)
    assert on_top.seconds(16) == 0.004
    for _ in range(9):
        on_top.observe(16, 0.008)
    assert on_top.seconds(16) == 0.008
    for _ in range(9):
        on_top.observe(16, -1.0)  # clocks: never below nothing
    assert on_top.seconds(16) == 0.0


def test_what_comes_on_top_is_that_of_prompts_of_such_a_length():
    on_top = OnTop()
    for _ in range(9):
        on_top.observe(16, 0.004)
        on_top.observe(8192, 0.03)
    assert on_top.seconds(20) == 0.004
    assert on_top.seconds(100_000) == 0.03
    for _ in range(64):
        on_top.observe(512, 0.01)
    assert on_top.seconds(8192) == 0.01  # the rest is forgotten
