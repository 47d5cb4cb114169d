"""Profiles from measured times with a known law."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.cost.operators import BatchShape
from millrace.core.cost.profile import Profile
from millrace.profiler.accuracy import compare, errors
from millrace.profiler.fitting import build_profile, prefill_latency
from millrace.profiler.measure import Decode, Far, Measured, Mixed, Prefill, usual
from millrace.profiles.eq_1 import rising
from support.known_law import CHUNK, LENGTHS, SUBJECT, far_s, measured, prefill

UNSEEN = (
    *(Prefill(40), Prefill(100), Prefill(300), Prefill(700), Prefill(60, 300), Prefill(300, 600)),
    *(Decode(3, 500), Decode(1, 600), Decode(20, 200), Decode(64, 512)),
    *(Mixed(100, 300, 5, 600), Mixed(400, 0, 30, 200), Mixed(40, 900, 2, 100)),
)


def test_what_was_measured_and_what_was_not_is_predicted() -> None:
    found = measured(UNSEEN)
    profile = build_profile(SUBJECT, found)
    for one in compare(profile, found, CHUNK):
        if one.model != "batched":
            assert one.error == pytest.approx(0.0, abs=0.12), one
    assert profile.errors["prefill"] < 0.02
    assert profile.errors["operators"] < 0.02
    assert profile.errors["decode"] < 0.02
    assert profile.errors["mixed"] < 0.02
    assert profile.errors["decode_step"] < 0.02


def test_without_passes_of_decodes_nothing_is_said_of_mixed_ones() -> None:
    profile = build_profile(SUBJECT, replace(measured(UNSEEN), rows={}))
    assert profile.mixed is None


def test_histories_beyond_the_longest_prompt_tell_of_mixed_passes_alone() -> None:
    plain = measured(UNSEEN)
    dear = Prefill(16, 8192)
    beyond = {dear: prefill(dear, slower=3.0)}
    profile = build_profile(SUBJECT, replace(plain, prefills={**plain.prefills, **beyond}))
    without = build_profile(SUBJECT, plain)
    assert (profile.prefill, profile.operators) == (without.prefill, without.operators)
    assert profile.mixed is not None and without.mixed is not None
    chunk = BatchShape(prefills=((16, 8192),))
    assert profile.mixed.pass_s(chunk) > 2.0 * without.mixed.pass_s(chunk)


@pytest.mark.parametrize("longest", [64, 256, 1024])
def test_a_short_measurement_reaches_the_end_of_the_context(longest: int) -> None:
    """Noise hides the square in short prompts; attention at the context's end shows it."""
    draw, context = Random(longest), 131_072
    short = {
        case: prefill(case, slower=draw.uniform(0.9, 1.1))
        for case in measured().prefills
        if case.tokens + case.history <= longest and case.batch == 1
    }
    ends = (Far(64, context - 64), Far(64, context // 4 - 64))
    far = {case: far_s(case) for case in ends}
    found = replace(measured(), prefills=short, longest=longest, far_s=far)
    profile = build_profile(SUBJECT, found)
    for tokens, history in ((16_384, 0), (99_005, 0), (131_072, 0), (512, 100_000), (64, 120_000)):
        passes_s = prefill(Prefill(tokens, history)).seconds
        assert profile.prefill.chunk_s(tokens, history) == pytest.approx(passes_s, rel=0.12)
    for operators in (profile.operators, profile.mixed_batches):
        chunk = BatchShape(prefills=((64, 120_000),))
        passes_s = prefill(Prefill(64, 120_000)).seconds
        assert operators.pass_s(chunk) == pytest.approx(passes_s, rel=0.2)
    assert any("up to 131072 tokens" in one for one in profile.assumptions)


def test_measured_prompts_are_met_exactly_and_held_out_ones_are_no_points() -> None:
    latency = prefill_latency(measured(UNSEEN))
    assert [tokens for tokens, _ in latency.points] == list(LENGTHS)
    for tokens in LENGTHS:
        assert latency.chunk_s(tokens) == pytest.approx(prefill(Prefill(tokens)).seconds, rel=1e-5)
    assert latency.c == pytest.approx(10e-9, rel=0.05)


def test_a_profile_says_how_far_it_is_off() -> None:
    found = measured(UNSEEN)
    slow = {
        case: prefill(case, 2.0) if case in found.held_out else timing
        for case, timing in found.prefills.items()
    }
    changed = Measured(
        prefills=slow,
        decode_s=found.decode_s,
        held_out=found.held_out,
        longest=1024,
        rounds=1,
        spent_s=1.0,
    )
    profile = build_profile(SUBJECT, changed)
    assert profile.errors["prefill"] == pytest.approx(0.5, abs=0.03)
    assert profile.errors["prefill_worst"] >= profile.errors["prefill"]
    assert profile.errors == errors(compare(profile, changed, CHUNK))


def test_it_is_written_and_read_and_says_what_was_not_measured() -> None:
    profile = build_profile(SUBJECT, measured(UNSEEN))
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile
    assert profile.prefill.degrees[0] == 1
    said = " ".join(profile.assumptions)
    for name in ("ring_step_s", "kv_transfer_bytes_s", "1024 tokens"):
        assert name in said


def test_times_that_fall_with_the_tokens_still_give_a_profile() -> None:
    """A busy machine may measure such times."""
    found = measured()
    backwards = dict(zip(found.prefills, reversed(list(found.prefills.values())), strict=True))
    profile = build_profile(
        SUBJECT,
        Measured(
            prefills=backwards,
            decode_s=found.decode_s,
            held_out=frozenset(),
            longest=1024,
            rounds=1,
            spent_s=1.0,
        ),
    )
    assert profile.prefill.chunk_s(100) > 0.0
    assert Profile.from_json(json.loads(json.dumps(profile.to_json()))) == profile


@given(st.lists(st.floats(1e-6, 1e3), min_size=1, max_size=30))
def test_rising_never_falls_and_keeps_what_rises(values: list[float]) -> None:
    found = rising(values)
    assert all(left <= right * (1 + 1e-9) for left, right in pairwise(found))
    assert sum(found) == pytest.approx(sum(values))
    assert rising(sorted(values)) == sorted(values)


def test_the_usual_time_leaves_out_what_the_machine_did_beside() -> None:
    assert usual([3.0]) == 3.0
    assert usual([9.0, 1.0, 1.1, 30.0]) == 1.1
