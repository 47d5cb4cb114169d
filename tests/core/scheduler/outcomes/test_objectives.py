"""Deadlines and paces that objectives set, and what outcomes teach."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.config import SchedulerConfig
from millrace.core.cost.answer_lengths import FIRST_GUESS_TOKENS, AnswerLengths
from millrace.core.cost.decode_step import DecodeStepTime
from millrace.core.live_request import LiveRequest
from millrace.core.priority.millrace.policy import MillracePolicy
from millrace.core.request import RequestState
from millrace.core.scheduler import effects
from millrace.core.scheduler.outcomes.objectives import allowed_s, mean_tbt_s
from support.core_events import Bench, instance, of, request

#: 10 ms a step, 1 ms a sequence, 1 ms for 100 tokens of context.
STEP = DecodeStepTime.of((0.01, 0.001, 1e-5))


def live(prompt: int = 100, new: int = 101, **objectives) -> LiveRequest:
    return LiveRequest(request("r", prompt, new, **objectives).request)


def bench(policy: str = "fcfs", decodes: int = 1, step: DecodeStepTime = STEP) -> Bench:
    fleet = [instance(f"d{n}", pages=1000, decode_step=step) for n in range(decodes)]
    return Bench(instance("p0", pages=10_000), *fleet, config=SchedulerConfig(policy=policy))


def deadline_of(made: Bench, name: str) -> float:
    return made.machine.requests[name].deadline_s


def test_an_end_to_end_objective_leaves_the_first_token_what_the_answer_does_not_need():
    made = bench()
    made.submit("a", 100, 101, e2e_s=3.0)  # a step with it: 10 + 1 + 2.01 ms, 100 times
    assert deadline_of(made, "a") == pytest.approx(3.0 - 1.301)
    made.submit("b", 100, 101, e2e_s=3.0)  # 10 + 2 + 4.02 ms beside a
    assert deadline_of(made, "b") == pytest.approx(3.0 - 1.602)


def test_the_decode_instance_is_told_the_expected_length():
    made = bench()
    made.submit("a", 100, 101, e2e_s=3.0)
    made.submit("b", 100, 400, e2e_s=3.0)
    admits = of(effects.AdmitDecode, made.all)
    assert [one.expected_tokens for one in admits] == [101, FIRST_GUESS_TOKENS]


def test_the_earlier_of_the_two_deadlines_counts():
    made = bench()
    made.submit("a", 100, 101, e2e_s=3.0, ttft_s=0.4)
    made.submit("b", 100, 1, e2e_s=0.3, ttft_s=0.4)  # one token: nothing follows the first
    assert (deadline_of(made, "a"), deadline_of(made, "b")) == (0.4, 0.3)


def test_an_objective_that_the_answer_alone_exceeds_is_due_at_once():
    made = bench()
    made.submit("a", 100, 101, e2e_s=0.5)
    assert deadline_of(made, "a") == 0.0


def test_without_known_steps_the_last_heartbeat_counts():
    made = Bench(instance("p0"), instance("d0"), config=SchedulerConfig(policy="fcfs"))
    made.submit("a", 100, 101, e2e_s=3.0)
    assert deadline_of(made, "a") == 3.0
    made.heartbeat("d0", tbt_s=0.02)
    made.submit("b", 100, 101, e2e_s=3.0)
    assert deadline_of(made, "b") == pytest.approx(1.0)


@given(st.lists(st.integers(1, 2000), max_size=40), st.integers(1, 4000))
def test_an_answer_is_expected_to_be_as_long_as_the_last_ones_of_its_class(ended, new):
    lengths, asked = AnswerLengths(), live(new=new)
    for tokens in ended:
        lengths.ended(live(), tokens)
    mean = sum(ended) / len(ended) if ended else FIRST_GUESS_TOKENS
    assert lengths.expected(asked) == pytest.approx(min(max(mean, 1.0), new))


def test_a_class_learns_its_own_lengths_and_takes_those_of_all_before():
    lengths = AnswerLengths()
    lengths.ended(live(slo_class="chat"), 10)
    lengths.ended(LiveRequest(request("r", choices=2, slo_class="report").request), 600)
    assert lengths.expected(live(new=4000, slo_class="chat")) == 10
    assert lengths.expected(live(new=4000, slo_class="report")) == 300  # of each choice
    assert lengths.expected(live(new=4000, slo_class="new")) == 155


def test_lengths_are_learned_from_answers_that_ended():
    made = bench()
    made.submit("a", 100, 400)
    made.serve("a")  # 5 tokens
    made.submit("b", 100, 400, e2e_s=1.0)
    assert made.machine.requests["b"].expected_tokens == 5


def test_the_pace_keeps_both_objectives():
    asked = live(tbt_s=0.05, e2e_s=3.0)
    asked.expect(101)
    asked.expect_first_token(1.0)
    assert asked.pace_s == pytest.approx(0.02)
    asked.expect_first_token(-4.0)
    assert asked.pace_s == 0.05
    asked.expect_first_token(3.5)  # the end is over: only the steps can be in time
    assert asked.pace_s == 0.05


def test_a_deadline_is_never_before_the_arrival():
    asked = live(e2e_s=1.0)
    asked.expect(1000)
    assert allowed_s(asked, 0.02) == 0.0


def test_a_mean_needs_a_second_token():
    asked = live()
    assert mean_tbt_s(asked, 8, 1.0) is None
    asked.accept(0)
    asked.advance(RequestState.PREFILLING, 0.0)
    asked.advance(RequestState.TRANSFERRING, 1.0)
    assert mean_tbt_s(asked, 1, 3.0) is None
    assert mean_tbt_s(asked, 5, 3.0) == 0.5


# ---- what the policy learns


def outcome(ends_s: float, tokens: int, **objectives) -> bool | None:
    """Plays a request whose first token comes at 1 s; returns whether it counts as in time."""
    made = bench("millrace")
    made.submit("a", 100, 101, **objectives)
    asked = made.machine.requests["a"]
    made.chunk_started("p0", "a")
    made.now_s = 1.0
    made.computed("p0", "a")
    made.released("p0", "a")
    made.decoding("d0", "a")
    made.now_s = ends_s
    made.finished("d0", "a", "length", tokens)
    return asked.in_time


@pytest.mark.parametrize(
    ("objectives", "in_time"),
    [
        ({}, None),
        ({"ttft_s": 1.0}, True),
        ({"ttft_s": 0.9}, False),
        ({"tbt_s": 0.02}, True),  # 100 steps in 2 s
        ({"tbt_s": 0.019}, False),
        ({"ttft_s": 1.0, "tbt_s": 0.019}, False),
        ({"ttft_s": 0.9, "tbt_s": 0.02}, False),
        ({"e2e_s": 3.0}, True),
        ({"e2e_s": 2.9}, False),
        ({"ttft_s": 1.0, "tbt_s": 0.02, "e2e_s": 3.0}, True),
        ({"ttft_s": 1.0, "tbt_s": 0.02, "e2e_s": 2.9}, False),
    ],
)
def test_in_time_is_what_meets_all_of_its_objectives(objectives, in_time):
    assert outcome(3.0, 101, **objectives) is in_time


def test_a_class_whose_answers_are_too_slow_gains_in_value():
    policy = MillracePolicy()
    for number in range(3000):  # every 30th is of the slow class
        slow = number % 30 == 0
        one = live(ttft_s=9.0, tbt_s=0.1 if slow else None, slo_class="slow" if slow else "quick")
        one.due_by(9.0)
        policy.first_token(one, 1.0)
        policy.finished(one, 2.0, 0.2)
    assert policy.value(live(slo_class="slow")) > 1.5
    assert policy.value(live(slo_class="quick")) == 1.0


def test_an_answer_that_moves_on_is_no_outcome():
    made = bench("millrace")
    made.submit("a", 100, 101, tbt_s=0.001)
    asked = made.machine.requests["a"]
    made.chunk_started("p0", "a")
    made.computed("p0", "a")
    made.released("p0", "a")
    made.decoding("d0", "a")
    made.now_s = 5.0
    made.finished("d0", "a", "moved", 5)
    assert asked.in_time is None
