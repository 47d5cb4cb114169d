"""Step times whose law is known, and those of shipped profiles."""

from __future__ import annotations

from statistics import median

import pytest

from millrace.profiles import load_profile
from millrace.profiles.decode_step import fit, of_profile

CASES = [(n, n * context) for n in (1, 2, 4, 8, 32) for context in (128, 1024, 8192)]


def test_a_straight_law_is_found() -> None:
    steps = [(n, context, 2e-3 + 1e-4 * n + 3e-8 * context) for n, context in CASES]
    assert fit(steps) == pytest.approx((2e-3, 1e-4, 3e-8))


def test_no_term_is_negative_however_few_or_odd_the_steps() -> None:
    falling = [(n, context, 1e-2 / n) for n, context in CASES]
    assert min(fit(falling)) >= 0.0
    base_s, per_sequence_s, per_context_token_s = fit([(1, 100, 0.01)])
    assert base_s + per_sequence_s + 100 * per_context_token_s == pytest.approx(0.01)


def test_steps_of_one_batch_say_nothing_of_the_time_of_a_sequence() -> None:
    base_s, per_sequence_s, _ = fit([(1, 64, 0.02), (1, 512, 0.021), (1, 4096, 0.022)])
    assert (base_s, per_sequence_s) == (pytest.approx(0.0203, rel=0.01), 0.0)


def test_a_profile_s_steps_are_met() -> None:
    profile = load_profile("llama3-8b-a100-tp1").operators
    base_s, per_sequence_s, per_context_token_s = of_profile(profile)
    errors = []
    for n, context in CASES:
        predicted_s = base_s + per_sequence_s * n + per_context_token_s * context
        errors.append(abs(predicted_s / profile.decode_step_s(n, context) - 1.0))
    assert median(errors) < 0.1
