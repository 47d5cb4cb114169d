"""What a request is worth, by how its class and its length band fare."""

from __future__ import annotations

import math

from millrace.core.priority.millrace.attainment import GOAL, HIGHEST_LOG_PRICE, Attainments
from millrace.core.request import Slo
from support.live_requests import live_request


def request(name: str, tokens: int = 100):
    return live_request("r", prompt_tokens=tokens, slo=Slo(ttft_s=1.0, class_name=name))


def outcomes(known: Attainments, name: str, share: float, *, tokens: int = 100, count: int = 2000):
    """Notes `count` outcomes, of which `share` are in time, evenly spread."""
    for number in range(count):
        in_time = math.floor((number + 1) * share) > math.floor(number * share)
        known.note(request(name, tokens), in_time)


def test_without_outcomes_all_are_worth_the_same() -> None:
    known = Attainments()
    assert known.band(request("chat")).value == known.band(request("file", 10**6)).value == 1.0


def test_a_class_behind_is_worth_more_while_the_others_have_to_spare() -> None:
    known = Attainments()
    outcomes(known, "file", 0.8)
    outcomes(known, "chat", 1.0)
    file, chat = (known.band(request(name)).value for name in ("file", "chat"))
    assert chat == 1.0
    assert 1.0 < file <= math.exp(HIGHEST_LOG_PRICE) + 1e-9


def test_a_class_above_the_goal_by_its_margin_has_no_price() -> None:
    known = Attainments()
    outcomes(known, "file", 0.99)
    outcomes(known, "chat", 0.99)
    assert known.band(request("file")).value == 1.0


def test_nobody_is_helped_where_all_together_are_below_the_goal() -> None:
    known = Attainments()
    for _ in range(2000):  # in turn, so that both have the last word
        outcomes(known, "file", 0.0, count=1)
        outcomes(known, "chat", 1.0, count=8)
    assert GOAL - 0.03 < 8 / 9 < GOAL
    assert known.band(request("file")).value == known.band(request("chat")).value == 1.0


def test_beyond_capacity_the_class_furthest_behind_is_worth_most() -> None:
    known = Attainments()
    for _ in range(1000):
        outcomes(known, "file", 0.0, count=1)
        outcomes(known, "chat", 1.0, count=2)
    assert known.band(request("file")).value > 100 * known.band(request("chat")).value


def test_a_band_is_helped_by_its_class() -> None:
    known = Attainments()
    for _ in range(2000):
        outcomes(known, "file", 1.0, tokens=100, count=19)
        outcomes(known, "file", 0.0, tokens=10**6, count=1)
    long, short = (known.band(request("file", tokens)).value for tokens in (10**6, 100))
    assert short == 1.0 or math.isclose(short, 1.0, rel_tol=0.2)
    assert long > 1.5 * short


def test_lengths_within_a_factor_of_eight_share_a_band() -> None:
    known = Attainments()
    assert known.band(request("a", 64)) is known.band(request("a", 511))
    assert known.band(request("a", 511)) is not known.band(request("a", 512))


def test_headroom_is_what_all_requests_together_have_to_spare() -> None:
    known = Attainments()
    assert known.headroom == 0.0
    outcomes(known, "chat", 1.0)
    assert known.headroom == 1.0
    outcomes(known, "chat", 0.9)
    assert known.headroom == 0.0


def test_weights_multiply() -> None:
    known = Attainments()
    known.weigh({"paid": 3.0})
    assert known.band(request("paid")).value == 3.0 * known.band(request("free")).value


def test_other_weights_count_at_once() -> None:
    known = Attainments()
    before = known.band(request("paid")).value
    known.weigh({"paid": 0.5})
    assert known.band(request("paid")).value == 0.5 * before


def test_an_outcome_of_less_weight_counts_less_and_of_weight_0_not_at_all() -> None:
    values = []
    for weight in (0.0, 0.2, 1.0):
        known = Attainments()
        for _ in range(200):
            known.note(request("other"), True)
        before = known.band(request("chat")).value
        for _ in range(10):
            known.note(request("chat"), True, weight)
        values.append(known.band(request("chat")).value)
    assert before == values[0] > values[1] > values[2]
