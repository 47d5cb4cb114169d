"""The latency model's shape: exact at points, monotone, and its inverse."""

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from millrace.core.cost.latency import MOST_TOKENS, Latency, SpLatency
from millrace.core.errors import ConfigError

coefficient = st.floats(0, 1, allow_subnormal=False)


@st.composite
def latencies(draw):
    lengths = draw(st.lists(st.integers(1, 300_000), max_size=7, unique=True).map(sorted))
    seconds = sorted(draw(st.lists(st.floats(0, 100), min_size=7, max_size=7)))
    return Latency(
        a=draw(coefficient),
        b=draw(coefficient) * 1e-4,
        c=draw(coefficient) * 1e-8,
        d=draw(coefficient) * 1e-8,
        points=tuple(zip(lengths, seconds, strict=False)),
    )


def test_without_points_it_is_the_polynomial():
    latency = Latency(a=1.0, b=0.1, c=0.01, d=0.001)
    assert latency.chunk_s(10, 20) == pytest.approx(1 + 0.1 * 10 + 0.01 * 20 * 10 + 0.001 * 100)
    assert latency.segments == ((0, 1.0, 0.1, 0.001),)


def test_between_points_it_has_the_curvature_of_the_fit():
    latency = Latency(b=0.1, d=0.01, points=((10, 3.0), (20, 8.0)))
    # The line through both gives 5.5 at 15; the quadratic is 0.01 * 5 * 5 below it there.
    assert latency.chunk_s(15) == pytest.approx(5.25)


def test_a_flat_stretch_does_not_dip():
    latency = Latency(d=0.01, points=((10, 3.0), (20, 3.0)))
    assert {latency.chunk_s(tokens) for tokens in range(10, 21)} == {3.0}


def test_outside_the_points_the_fit_is_moved_to_meet_them():
    latency = Latency(a=1.0, b=0.1, points=((10, 3.0), (20, 8.0)))
    assert latency.chunk_s(5) == pytest.approx(2.5)
    assert latency.chunk_s(30) == pytest.approx(9.0)


def test_below_the_points_it_is_never_negative():
    latency = Latency(b=1.0, points=((10, 2.0),))  # moved, the fit would be -7 at one token
    assert latency.chunk_s(1) == pytest.approx(0.2)
    assert latency.chunk_s(9) < 2.0


@given(latencies(), st.integers(0, 1_000_000))
def test_it_is_exact_at_points_and_history_adds_its_product(latency, history):
    for tokens, seconds in latency.points:
        added = latency.c * tokens * history
        assert latency.chunk_s(tokens, history) == pytest.approx(seconds + added, abs=1e-9)


@given(latencies(), st.integers(1, 400_000), st.integers(1, 50_000))
def test_it_never_falls_and_is_never_negative(latency, tokens, more):
    assert latency.chunk_s(tokens) >= -1e-9
    assert latency.chunk_s(tokens + more) >= latency.chunk_s(tokens) - 1e-9


@example(Latency(a=0.0, b=0.0, c=0.0, d=1e-253), 1e-253, 0)  # whose squares are 0
@given(latencies(), st.floats(0, 200), st.integers(0, 1_000_000))
def test_tokens_within_is_the_largest_count_that_fits(latency, budget_s, history):
    found = latency.tokens_within(budget_s, history)
    if found:
        assert latency.chunk_s(found, history) <= budget_s
    else:
        assert latency.chunk_s(1, history) > budget_s
    if found < MOST_TOKENS:
        assert latency.chunk_s(found + 1, history) > budget_s


@given(latencies(), st.integers(1, 400_000))
def test_tokens_within_inverts_chunk_s(latency, tokens):
    assume(latency.chunk_s(tokens + 1) > latency.chunk_s(tokens))
    assume(latency.chunk_s(tokens) > latency.chunk_s(tokens - 1) or tokens == 1)
    found = latency.tokens_within(latency.chunk_s(tokens))
    assert latency.chunk_s(found) == pytest.approx(latency.chunk_s(tokens), abs=1e-12)


def test_a_model_that_never_grows_fits_any_count():
    assert Latency(a=1.0, b=0.0).tokens_within(2.0) == MOST_TOKENS


def test_scaling_scales_every_term_and_point():
    latency = Latency(a=1.0, b=0.1, c=0.2, d=0.3, points=((10, 40.0),)).scaled(2.0)
    assert latency == Latency(a=2.0, b=0.2, c=0.4, d=0.6, points=((10, 80.0),))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"a": -1.0}, "latency.a is -1.0"),
        ({"d": float("nan")}, "latency.d is nan"),
        ({"points": ((10, 1.0), (10, 2.0))}, "must ascend"),
        ({"points": ((10, 2.0), (20, 1.0))}, "must not fall"),
        ({"points": ((0, 2.0),)}, "must ascend"),
    ],
)
def test_bad_models_are_refused(fields, message):
    with pytest.raises(ConfigError, match=message):
        Latency(**fields)


class TestSpLatency:
    sp = SpLatency(by_sp={4: Latency(a=3.0, b=0.25), 1: Latency(b=1.0), 2: Latency(a=1.0, b=0.5)})

    def test_degrees_ascend(self):
        assert self.sp.degrees == (1, 2, 4)

    def test_each_degree_answers_for_itself(self):
        assert self.sp.chunk_s(8, 0, 2) == 5.0
        assert self.sp.tokens_within(5.0, 0, 2) == 8

    def test_isolated_is_the_best_degree(self):
        assert [self.sp.isolated_s(tokens) for tokens in (1, 2, 4, 100)] == [1.0, 2.0, 3.0, 28.0]

    def test_scaled(self):
        assert self.sp.scaled(2.0).chunk_s(8, 0, 2) == 10.0

    def test_limited(self):
        assert self.sp.limited(3).degrees == (1, 2)
        with pytest.raises(ConfigError, match="must start with 1"):
            self.sp.limited(0)

    def test_an_unknown_degree_is_named(self):
        for ask in (self.sp.chunk_s, self.sp.tokens_within):
            with pytest.raises(ConfigError, match=r"sp is 3; .* degrees \(1, 2, 4\)"):
                ask(8, 0, 3)

    @pytest.mark.parametrize("by_sp", [{}, {2: Latency()}, {0: Latency(), 1: Latency()}])
    def test_degree_one_is_the_least(self, by_sp):
        with pytest.raises(ConfigError, match="must start with 1"):
            SpLatency(by_sp=by_sp)
