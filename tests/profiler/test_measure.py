"""Measurements of attention at the context's end, with a known law."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from millrace.profiler.measure import Far, as_wide, far_cases

PAIR_S = 1e-8


def law_s(far: Far) -> float:
    """Gives a pair in a narrow chunk a higher cost, because K/V is read for fewer rows."""
    return far.pairs * PAIR_S * (1.0 + 16.0 / far.tokens)


@pytest.mark.parametrize("budget_s", [1e-6, 0.05, 1.0, 1e9])
def test_narrow_chunks_say_what_wide_ones_cost(budget_s: float) -> None:
    clock = SimpleNamespace(now_s=0.0)

    def attention_s(tokens: int, history: int) -> float:
        clock.now_s += law_s(Far(tokens, history))
        return 0.0

    workload = SimpleNamespace(
        max_chunk_tokens=2048, context_tokens=131_072, attention_s=attention_s
    )
    cases = far_cases(workload, 1024, budget_s, lambda: clock.now_s)
    assert {case.end for case in cases} == {131_072, 65_536, 32_768, 16_384}
    found = as_wide({case: law_s(case) for case in cases})
    assert {case.end for case in found} == {case.end for case in cases}
    widest = max(case.tokens for case in cases)
    for case, seconds in found.items():
        assert seconds == pytest.approx(case.pairs * PAIR_S * (1.0 + 16.0 / widest))


def test_a_short_context_is_measured_whole() -> None:
    workload = SimpleNamespace(max_chunk_tokens=2048, context_tokens=1000, attention_s=None)
    assert far_cases(workload, 1024, 1.0, lambda: 0.0) == []
    assert as_wide({}) == {}
