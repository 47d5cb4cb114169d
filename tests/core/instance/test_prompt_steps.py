"""How often an instance reports how far a prompt is."""

from __future__ import annotations

import pytest

from millrace.core.instance.prompt_steps import MOST_REPORTS, PromptSteps


@pytest.mark.parametrize(("prompt_tokens", "pass_tokens"), [(400, 100), (64, 1), (1_000_000, 512)])
def test_each_pass_is_told_but_of_many_passes_a_part(prompt_tokens: int, pass_tokens: int) -> None:
    steps = PromptSteps()
    ends = range(pass_tokens, prompt_tokens + 1, pass_tokens)
    told = [end for end in ends if steps.is_due(end, prompt_tokens)]
    assert len(told) <= MOST_REPORTS
    if len(ends) <= MOST_REPORTS:
        assert told == [end for end in ends if end < prompt_tokens]
    else:
        assert len(told) > MOST_REPORTS // 2


def test_the_end_is_not_told() -> None:
    assert not PromptSteps().is_due(10, 10)
