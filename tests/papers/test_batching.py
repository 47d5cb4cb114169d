"""SLO-aware batching, FlowPrefill section 5.2, Algorithm 1."""

import math

from hypothesis import given
from hypothesis import strategies as st

from millrace.core.live_request import LiveRequest
from millrace.core.scheduler.fleet.batching import RESERVE, batch
from support.priority import names, request

MS = 1e-3


def per_token(tokens: int) -> float:
    """Predicts 1 ms per token."""
    return tokens * MS


def of(name: str, tokens: int, deadline_s: float = 100.0, **more: float) -> LiveRequest:
    return request(name, tokens=tokens, deadline_s=deadline_s, work_s=tokens * MS, **more)


def test_candidates_join_while_the_head_stays_in_time() -> None:
    """T_remain = 1 s, of which 0.1 s stays in reserve: 0.3, 0.5, then 0.89 s at 1 ms a token."""
    head = of("H", 300, deadline_s=1.0)
    candidates = [of("a", 200), of("b", 390), of("c", 20)]
    assert names(batch(head, candidates, 2048, 0.0, per_token)) == ["H", "a", "b"]


def test_t_remain_is_from_now() -> None:
    head = of("H", 300, deadline_s=1.0)
    candidates = [of("a", 200), of("b", 400)]
    assert names(batch(head, candidates, 2048, 0.39, per_token)) == ["H", "a"]


def test_the_batch_stays_under_the_budget() -> None:
    """n < G, strictly; a request that is too long is passed over, a shorter one after it not."""
    head = of("H", 1000)
    candidates = [of("a", 1048), of("b", 1047), of("c", 1)]
    assert names(batch(head, candidates, 2048, 0.0, per_token)) == ["H", "b"]


def test_a_budget_of_nothing_leaves_requests_alone() -> None:
    assert names(batch(of("H", 1), [of("a", 1)], 0, 0.0, per_token)) == ["H"]


def test_a_head_beyond_the_budget_runs_alone() -> None:
    assert names(batch(of("H", 5000), [of("a", 1)], 2048, 0.0, per_token)) == ["H"]


def test_an_urgent_head_runs_alone() -> None:
    """The public code's rule: with less than a tenth of the SLO left, no request may join."""
    head = of("H", 10, deadline_s=10.0)
    assert names(batch(head, [of("a", 1)], 2048, 8.9, per_token)) == ["H", "a"]
    assert names(batch(head, [of("a", 1)], 2048, 9.05, per_token)) == ["H"]


def test_the_search_ends_with_the_first_that_leaves_too_little() -> None:
    head = of("H", 500, deadline_s=1.0)
    candidates = [of("a", 450), of("b", 1)]
    assert names(batch(head, candidates, 2048, 0.0, per_token)) == ["H"]


def test_a_head_that_is_late_already_runs_alone() -> None:
    assert names(batch(of("H", 10, deadline_s=1.0), [of("a", 1)], 99, 1.0, per_token)) == ["H"]


def test_a_head_without_deadline_fills_the_budget() -> None:
    head = of("H", 10, deadline_s=math.inf)
    candidates = [of("a", 1000, deadline_s=math.inf), of("b", 1000, deadline_s=math.inf)]
    assert names(batch(head, candidates, 2048, 1e6, per_token)) == ["H", "a", "b"]


def test_a_candidate_that_would_be_late_in_the_batch_is_passed_over() -> None:
    """Alone it needs 0.1 s and has 0.35 s; the batch of 400 tokens takes 0.4 s."""
    head = of("H", 300)
    candidates = [of("soon", 100, deadline_s=0.35), of("b", 40)]
    assert names(batch(head, candidates, 2048, 0.0, per_token)) == ["H", "b"]


def test_a_member_is_not_made_late_by_those_after_it() -> None:
    head = of("H", 300)
    candidates = [of("soon", 100, deadline_s=0.45), of("b", 60), of("c", 40)]
    assert names(batch(head, candidates, 2048, 0.0, per_token)) == ["H", "soon", "c"]


def test_a_lost_candidate_joins_on_the_heads_terms() -> None:
    """It can't be in time any more, so the batch's length costs it nothing."""
    lost = of("lost", 100, deadline_s=0.05)
    assert names(batch(of("H", 300), [lost], 2048, 0.0, per_token)) == ["H", "lost"]


def test_the_prediction_is_asked_for_the_batchs_tokens() -> None:
    """Latencies that are no straight line: 100 tokens take 0.01 s, 200 take 0.04 s."""
    asked = []

    def quadratic(tokens: int) -> float:
        asked.append(tokens)
        return (tokens * MS) ** 2

    head = of("H", 100, deadline_s=0.06)
    assert names(batch(head, [of("a", 100), of("b", 50)], 2048, 0.0, quadratic)) == ["H", "a"]
    assert asked == [200, 250]


seconds = st.floats(-1.0, 5.0)
requests = st.lists(
    st.builds(of, st.just("r"), st.integers(1, 800), st.one_of(seconds, st.just(math.inf))),
    max_size=12,
)


@given(requests, st.integers(1, 800), st.one_of(seconds, st.just(math.inf)), st.integers(0, 3000))
def test_nobody_who_could_be_in_time_is_made_late(
    candidates: list[LiveRequest], tokens: int, deadline_s: float, budget: int
) -> None:
    head = of("H", tokens, deadline_s)
    members = batch(head, candidates, budget, 0.0, per_token)
    assert members[0] is head
    order = [next(i for i, c in enumerate(candidates) if c is m) for m in members[1:]]
    assert order == sorted(set(order))  # in the order given, no request twice
    if len(members) == 1:
        return
    total = sum(m.prompt_tokens for m in members)
    assert total < budget
    assert per_token(total) < deadline_s
    if math.isfinite(deadline_s):
        assert deadline_s - per_token(total) >= RESERVE * deadline_s
    for m in members[1:]:
        assert m.deadline_s - m.predicted_prefill_s <= 0.0 or m.deadline_s > per_token(total)


@given(requests, st.integers(1, 800), st.integers(0, 3000))
def test_with_deadlines_behind_the_heads_it_is_algorithm_1(
    candidates: list[LiveRequest], tokens: int, budget: int
) -> None:
    """Against the algorithm as printed; the reserve ends the search, so it is taken off here."""
    head = of("H", tokens, 2.0)
    for candidate in candidates:
        candidate.deadline_s = max(candidate.deadline_s, 2.0)
    expected, n = [head], tokens
    for candidate in candidates:
        left_s = 2.0 - per_token(n + candidate.prompt_tokens)
        if n + candidate.prompt_tokens < budget:
            if left_s < RESERVE * 2.0:
                break
            expected.append(candidate)
            n += candidate.prompt_tokens
    got = batch(head, candidates, budget, 0.0, per_token)
    assert [id(r) for r in got] == [id(r) for r in expected]
