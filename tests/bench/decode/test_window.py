"""The part of a round in which all requests decode, and what it costs."""

import pytest

from millrace.bench.decode.window import Sample, Window, costs_of, length_for, window_of
from millrace.core.errors import MillraceError


def test_only_the_time_in_which_all_decode_counts():
    first = [(1.0, 1), (2.0, 1), (3.0, 1), (4.0, 2), (5.0, 1)]
    second = [(2.5, 1), (3.0, 1), (4.0, 2), (5.5, 1)]
    window = window_of([first, second], prompt_tokens=10)
    assert (window.start_s, window.end_s, window.tokens) == (3.0, 5.0, 5)
    assert window.context_tokens == [13, 12]
    assert window.tokens_per_s == 2.5


@pytest.mark.parametrize("late", [[(9.0, 1), (9.5, 1)], [(2.0, 1)]])
def test_requests_that_never_decode_together_are_refused(late):
    with pytest.raises(MillraceError, match="raise --steps"):
        window_of([[(1.0, 1), (2.0, 1), (3.0, 1)], late], prompt_tokens=10)


def test_costs_are_those_within_the_window():
    window = Window(start_s=1.0, end_s=4.0, tokens=8, context_tokens=[1])
    samples = [
        Sample(at_s=at, steps=steps, step_s=step_s, cpu_s={"proxy": cpu})
        for at, steps, step_s, cpu in ((0.5, 0, 0, 0), (1.5, 100, 1.0, 3.0), (3.5, 300, 2.6, 3.5))
    ]
    costs = costs_of(samples, window)
    assert costs.step_ms == pytest.approx(8.0) and costs.between_steps_ms == pytest.approx(2.0)
    assert costs.cpu_ms == {"proxy": pytest.approx(2.5)}
    assert costs_of(samples[:2], window) is None


def test_answers_are_longer_by_what_the_last_prompt_takes():
    first = [(1.0, 1), (1.5, 5)]  # 0.1 s per token
    last = [(3.5, 1), (4.1, 2), (4.5, 3)]  # 0.2 s
    assert length_for([first, last], 100) == 122  # 1.3 times 2.5 s of steps of 0.15 s
    at_the_end = [(2.0, 1), (2.01, 10)]
    assert length_for([first, at_the_end, last], 100) == 133  # of 0.1 s
    assert length_for([first], 100) == 100
    at_once = [(1.0, 16)], [(1.00105, 16)]  # no step is quicker than 0.1 ms
    assert length_for(at_once, 100) == 114
