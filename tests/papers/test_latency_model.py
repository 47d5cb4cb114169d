"""Tetris section 5.1 (Eq. (1)), Table 1 and section 2.4; Mnemosyne section 4.4; Medha section 3.3.

The numbers are those printed in the papers.
"""

import pytest

from millrace.core.cost.operators import BatchShape
from millrace.profiles import load_profile

K = 1024
LENGTHS = (4, 8, 16, 32, 64, 128, 256)  # k tokens
TABLE_1 = {
    1: (0.28, 0.57, 1.29, 3.22, 9.05, 29.2),  # 256k did not fit
    2: (0.16, 0.31, 0.69, 1.67, 4.61, 14.3, 50.07),
    4: (0.13, 0.2, 0.39, 0.92, 2.43, 7.32, 24.77),
    8: (0.21, 0.24, 0.31, 0.58, 1.37, 3.96, 12.81),
    16: (0.39, 0.43, 0.46, 0.53, 0.96, 2.31, 7.02),
}
BEST_SP = (4, 4, 8, 16, 16, 16, 16)

LLAMA_8B = load_profile("llama3-8b-a100-tp1")


@pytest.mark.parametrize("sp", TABLE_1)
def test_table_1_is_met_at_its_points(sp):
    found = [LLAMA_8B.prefill.chunk_s(length * K, 0, sp) for length in LENGTHS]
    assert found[: len(TABLE_1[sp])] == pytest.approx(TABLE_1[sp], rel=1e-12)


@pytest.mark.parametrize(("length", "best"), list(zip(LENGTHS, BEST_SP, strict=True)))
def test_the_best_sp_of_each_length_is_table_1s(length, best):
    prefill = LLAMA_8B.prefill.limited(16)
    assert min(prefill.degrees, key=lambda sp: prefill.chunk_s(length * K, 0, sp)) == best
    assert prefill.isolated_s(length * K) == prefill.chunk_s(length * K, 0, best)


def test_section_2_4_two_requests():
    # 16 instances, 1 s of queue: greedy gives 32k all of them; reserving 8 gives both SP 8.
    chunk_s = LLAMA_8B.prefill.chunk_s
    greedy_32k = 1.0 + chunk_s(32 * K, 0, 16)
    greedy_16k = greedy_32k + chunk_s(16 * K, 0, 8)
    reserved_32k, reserved_16k = 1.0 + chunk_s(32 * K, 0, 8), 1.0 + chunk_s(16 * K, 0, 8)
    assert (greedy_32k, greedy_16k) == pytest.approx((1.53, 1.84))
    assert (reserved_32k, reserved_16k) == pytest.approx((1.58, 1.31))


def test_section_2_4_waiting_for_more_instances():
    # 128k while a 16k request holds 8 of 16 for 0.31 s: SP 16 after it, or SP 8 at once.
    chunk_s = LLAMA_8B.prefill.chunk_s
    wait_s = chunk_s(16 * K, 0, 8)
    assert wait_s + chunk_s(128 * K, 0, 16) == pytest.approx(2.62)
    assert chunk_s(128 * K, 0, 8) == pytest.approx(3.96)


def test_attention_with_history_costs_twice_the_quadratic_term():
    # Eq. (1) by FLOP counting: each of L tokens meets all C, but only half of L: c = 2 d.
    for latency in LLAMA_8B.prefill.by_sp.values():
        assert latency.c == 2 * latency.d


def test_algorithm_3_line_13_solves_eq_1_for_the_budget():
    # Section 2.4: what SP 8 computes in the 0.31 s until SP 16 is free is 16k tokens.
    assert LLAMA_8B.prefill.tokens_within(0.31 + 1e-9, 0, 8) == 16 * K
    first = LLAMA_8B.prefill.by_sp[8]
    found = first.tokens_within(0.31, 32 * K)
    assert 0 < found < 16 * K
    assert first.chunk_s(found, 32 * K) <= 0.31 < first.chunk_s(found + 1, 32 * K)


@pytest.mark.parametrize(("length", "seconds"), list(zip(LENGTHS, TABLE_1[1], strict=False)))
def test_operators_add_up_to_table_1_at_sp_1(length, seconds):
    batch = BatchShape(prefills=((length * K, 0),))
    assert LLAMA_8B.operators.pass_s(batch) == pytest.approx(seconds, rel=0.02)


def test_a_prefill_in_chunks_costs_about_as_much_as_in_one():
    # FLOPs don't depend on chunking; what chunks add is overhead (Sarathi: up to a fifth).
    operators = LLAMA_8B.operators
    whole_s = operators.pass_s(BatchShape(prefills=((32 * K, 0),)))
    chunked_s = sum(
        operators.pass_s(BatchShape(prefills=((2 * K, done),))) for done in range(0, 32 * K, 2 * K)
    )
    assert whole_s < chunked_s < 1.2 * whole_s


def test_degrees_beyond_the_table_go_on_paying_for_the_ring():
    prefill = LLAMA_8B.prefill
    step_s = LLAMA_8B.ring_step_s * LLAMA_8B.layers
    short_s = [prefill.chunk_s(K, 0, sp) for sp in (32, 64, 128)]
    assert short_s[1] - short_s[0] == pytest.approx(32 * step_s, rel=0.01)
    assert short_s[2] - short_s[1] == pytest.approx(64 * step_s, rel=0.01)
    # Compute is divided: a very long prompt is faster still.
    assert prefill.chunk_s(4096 * K, 0, 128) < prefill.chunk_s(4096 * K, 0, 32) / 2


@pytest.mark.parametrize(
    ("context", "kvp", "ratio"),
    [
        (10_000_000, 2, 0.6),  # Medha section 3.3: almost 40 % less, about 30 tokens a second
        (10_000_000, 4, 1 / 2.5),  # Mnemosyne section 6
        (4_000_000, 4, 1 / 1.7),
    ],
)
def test_kvp_shortens_decode_steps_as_printed(context, kvp, ratio):
    operators = load_profile("llama3-8b-h100-tp8").operators
    found = operators.decode_step_s(1, context, kvp) / operators.decode_step_s(1, context)
    assert found == pytest.approx(ratio, rel=0.02)


def test_kvp_2_decodes_10_million_tokens_at_about_30_a_second():
    operators = load_profile("llama3-8b-h100-tp8").operators
    assert 1 / operators.decode_step_s(1, 10_000_000, 2) == pytest.approx(30, rel=0.15)


def test_eq_9_only_attention_is_divided():
    operators = load_profile("llama3-8b-h100-tp8").operators
    context, layers = 1_000_000, operators.layers
    whole_s = operators.layers * operators.decode_attn.at(1, context)
    rest_s = operators.decode_step_s(1, context) - whole_s
    shared_s = operators.decode_step_s(1, context, 4)
    divided_s = layers * (operators.decode_attn.at(1, context / 4) + operators.merge_s(1, 4))
    assert shared_s == pytest.approx(rest_s + divided_s)


def test_eq_10_kvp_communication_depends_on_the_queries_only():
    operators = load_profile("llama3-8b-h100-tp8").operators
    assert operators.merge_s(2048, 2) > operators.merge_s(32, 2) > operators.merge_s(1, 2) > 0
    long, short = (BatchShape(prefills=((512, history),)) for history in (8_000_000, 1_000_000))
    gained = [operators.pass_s(batch) - operators.pass_s(batch, 2) for batch in (long, short)]
    assert gained[0] > 7 * gained[1] > 0


def test_small_chunks_of_a_long_prefill_read_kv_efficiently():
    # Medha section 3.1, Mnemosyne figure 7: a prefill of 1M tokens of Llama-3-70B on 8 H100
    # spends 11 % more on attention in chunks of 32 than in chunks of 2048.
    operators = load_profile("llama3-70b-h100-tp8").operators
    per_token_s = {
        chunk: operators.layer_s(BatchShape(prefills=((chunk, 500_000),)))[1] / chunk
        for chunk in (32, 2048)
    }
    assert per_token_s[32] / per_token_s[2048] == pytest.approx(1.11, abs=0.1)
