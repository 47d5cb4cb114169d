"""The fit of Tetris Eq. (1)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.profiles.eq_1 import fit, latency


@given(
    a=st.floats(0, 0.1),
    b=st.floats(1e-6, 1e-2),
    d=st.floats(0, 1e-5),
)
def test_the_fit_finds_the_coefficients_it_was_drawn_from(a: float, b: float, d: float) -> None:
    points = [(n, a + b * n + d * n * n) for n in (16, 32, 64, 128, 256, 512, 1024)]

    fitted = latency(*fit(points))

    for length, seconds in points:
        assert fitted.chunk_s(length, 0) == pytest.approx(seconds, rel=1e-4)
    assert fitted.c == 2 * fitted.d


@given(st.lists(st.floats(1e-4, 10), min_size=1, max_size=7))
def test_no_term_is_negative_whatever_was_measured(seconds: list[float]) -> None:
    fitted = latency(*fit([(16 << i, s) for i, s in enumerate(seconds)]))

    assert min(fitted.a, fitted.b, fitted.c, fitted.d) >= 0
