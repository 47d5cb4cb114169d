"""Medha appendix A.3, Alg. 3: the cache of prefill times under adaptive chunking."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.cost.operators import BatchShape, DecodeAttention, OperatorModel, Table
from millrace.core.cost.prefill_times import ChunkLimits, PrefillTimes, optimal_chunk
from millrace.core.errors import ConfigError
from millrace.profiles import load_profile

FLAT = Table(xs=(0.0,), ys=(0.0,))


def model(token_s=1.0, pair_s=0.0, overhead_s=0.0):
    """A pass takes overhead + token_s * L + pair_s * (L^2 + 2 C L)."""
    return OperatorModel(
        layers=1,
        qkv_proj=Table(xs=(0.0, 1.0), ys=(0.0, token_s)),
        o_proj=FLAT,
        gate_up_proj=FLAT,
        down_proj=FLAT,
        attn=Table(xs=(0.0, 1.0), ys=(0.0, pair_s)),
        history_factor=Table(xs=(1.0,), ys=(1.0,)),
        kv_read_s=0.0,
        decode_attn=DecodeAttention(batches=(1,), tables=(FLAT,)),
        lm_head=FLAT,
        overhead_s=overhead_s,
        kvp_message_s=0.0,
        kvp_token_s=0.0,
    )


def simulate_prefill(operators, total, target_s, limits):
    """SIMULATE_PREFILL of Alg. 3 by trying every chunk size, the last chunk cut."""
    seconds, processed = 0.0, 0
    while processed < total:
        sizes = range(limits.least, limits.most + 1, limits.step)
        fit = [
            size
            for size in sizes
            if operators.pass_s(BatchShape(prefills=((size, processed),))) <= target_s
        ]
        chunk = min(max(fit, default=limits.least), total - processed)
        seconds += operators.pass_s(BatchShape(prefills=((chunk, processed),)))
        processed += chunk
    return seconds


def test_by_hand():
    # A pass of L tokens takes 1 + L; the target of 5 s allows 4. 10 tokens: 4, 4, 2.
    times = PrefillTimes(
        model(overhead_s=1.0),
        target_s=5.0,
        granularity=1,
        limits=ChunkLimits(least=1, most=100, step=1),
    )
    assert times.total_s(10) == 5 + 5 + 3
    assert times.remaining_s(10, 0) == 13.0
    assert times.remaining_s(10, 8) == 3.0
    assert times.remaining_s(10, 10) == 0.0


def test_chunks_shrink_as_the_history_grows():
    operators = model(token_s=1.0, pair_s=0.001)
    limits = ChunkLimits(least=1, most=1000, step=1)
    chunks = [optimal_chunk(operators, history, 50.0, limits) for history in range(0, 5000, 500)]
    assert chunks == sorted(chunks, reverse=True)
    # 1 * 25 + 0.001 * (625 + 2 * 500 * 25) = 50.6; one token less fits.
    assert chunks[1] == 24


def test_the_least_chunk_runs_when_none_fits():
    limits = ChunkLimits(least=32, most=64, step=32)
    assert optimal_chunk(model(), 0, 1.0, limits) == 32
    assert PrefillTimes(model(), target_s=1.0, limits=limits).total_s(2048) == pytest.approx(2048)


@given(
    st.floats(0.001, 0.1),
    st.floats(0, 1e-5),
    st.floats(0, 0.5),
    st.integers(1, 60),
    st.integers(1, 20),
)
def test_one_walk_gives_what_simulating_each_length_gives(
    token_s, pair_s, overhead_s, entries, granularity
):
    operators = model(token_s, pair_s, overhead_s)
    limits = ChunkLimits(least=2, most=64, step=2)
    times = PrefillTimes(operators, target_s=1.0, granularity=granularity, limits=limits)
    total = entries * granularity
    assert times.total_s(total) == pytest.approx(simulate_prefill(operators, total, 1.0, limits))


def test_asking_for_longer_requests_later_changes_nothing():
    operators = load_profile("llama3-8b-h100-tp1").operators
    at_once = PrefillTimes(operators, target_s=0.05)
    in_steps = PrefillTimes(operators, target_s=0.05)
    for tokens in (100, 3000, 20_000):
        in_steps.total_s(tokens)
    assert in_steps.total_s(100_000) == at_once.total_s(100_000)


def test_between_entries_it_is_interpolated():
    times = PrefillTimes(model(), target_s=1e9, granularity=100, limits=ChunkLimits())
    assert times.total_s(150) == pytest.approx((times.total_s(100) + times.total_s(200)) / 2)


def test_spp_divides():
    operators = load_profile("llama3-8b-h100-tp8").operators
    one = PrefillTimes(operators, target_s=0.05)
    four = PrefillTimes(operators, target_s=0.05, spp=4)
    assert four.remaining_s(50_000, 10_000) == one.remaining_s(50_000, 10_000) / 4


def test_the_end_of_a_long_prefill_takes_longer_than_its_start():
    times = PrefillTimes(load_profile("llama3-8b-h100-tp8").operators, target_s=0.02)
    halves = times.remaining_s(200_000, 100_000), times.total_s(100_000)
    assert halves[0] > 1.3 * halves[1]


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"target_s": 0.0}, "target_s"),
        ({"target_s": 1.0, "granularity": 0}, "granularity"),
        ({"target_s": 1.0, "spp": 0}, "spp"),
    ],
)
def test_bad_settings_are_named(fields, name):
    with pytest.raises(ConfigError, match=name):
        PrefillTimes(model(), **fields)


@pytest.mark.parametrize("fields", [{"least": 0}, {"least": 64, "most": 32}, {"step": 0}])
def test_bad_limits_are_named(fields):
    with pytest.raises(ConfigError, match=r"least is|step is"):
        ChunkLimits(**fields)
