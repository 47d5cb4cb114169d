"""The operator model on tables small enough to add up by hand."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.core.cost.operators import (
    OPERATORS,
    BatchShape,
    DecodeAttention,
    OperatorModel,
    Table,
)
from millrace.core.errors import ConfigError
from millrace.profiles import load_profile, profile_names


def line(slope, start=0.0):
    return Table(xs=(0.0, 1.0), ys=(start, start + slope))


def model(**changed):
    fields = {
        "layers": 2,
        "qkv_proj": line(3.0),
        "o_proj": line(2.0),
        "gate_up_proj": line(5.0),
        "down_proj": line(4.0),
        "attn": line(0.5),
        "history_factor": Table(xs=(1.0,), ys=(1.0,)),
        "kv_read_s": 0.0,
        "decode_attn": DecodeAttention(batches=(1, 3), tables=(line(1.0), line(1.0, start=4.0))),
        "lm_head": line(10.0),
        "overhead_s": 100.0,
        "kvp_message_s": 0.0,
        "kvp_token_s": 0.0,
    }
    return OperatorModel(**(fields | changed))


def test_a_table_is_linear_between_level_before_and_straight_after():
    table = Table(xs=(1.0, 3.0, 4.0), ys=(2.0, 6.0, 7.0))
    assert [table.at(x) for x in (0, 1, 2, 3, 3.5, 4, 10)] == [2, 2, 4, 6, 6.5, 7, 13]


def test_a_table_that_ends_falling_stays_level():
    assert Table(xs=(1.0, 2.0), ys=(5.0, 1.0)).at(9) == 1.0


@pytest.mark.parametrize(
    ("xs", "ys"),
    [
        ((), ()),
        ((1.0,), (1.0, 2.0)),
        ((1.0, 1.0), (1.0, 2.0)),
        ((1.0, 2.0), (1.0, -2.0)),
        ((1.0,), (float("nan"),)),
    ],
)
def test_bad_tables_are_refused(xs, ys):
    with pytest.raises(ConfigError, match="table"):
        Table(xs=xs, ys=ys)


def test_operators_of_a_layer_come_in_order():
    # 4 tokens: 3 of a chunk, 1 decode. Attention: 0.5 * 9 and, of the decode, 7.
    batch = BatchShape(prefills=((3, 0),), decodes=1, decode_context_tokens=7)
    assert OPERATORS == ("qkv_proj", "attn", "o_proj", "gate_up_proj", "down_proj")
    assert model().layer_s(batch) == (12.0, 11.5, 8.0, 20.0, 16.0)
    assert model().longest_operator_s(batch) == 20.0


def test_a_pass_is_overhead_layers_and_head():
    batch = BatchShape(prefills=((3, 0),), decodes=1, decode_context_tokens=7)
    assert model().pass_s(batch) == 100 + 2 * (12 + 11.5 + 8 + 20 + 16) + 10 * 2


def test_a_pass_beyond_the_tables_follows_each_operator():
    falling = Table(xs=(0.0, 1.0), ys=(5.0, 1.0))  # level from its end on
    batch = BatchShape(prefills=((9, 0),))
    slow = model(o_proj=falling)
    assert slow.pass_s(batch) == 100 + 2 * sum(slow.layer_s(batch)) + 10


def test_an_empty_pass_takes_no_time():
    assert model().pass_s(BatchShape()) == 0.0
    assert model().decode_step_s(0, 0) == 0.0


def test_history_counts_twice_its_product():
    # (L + C)^2 - C^2 = L^2 + 2 L C: the pairs of a triangle and of a rectangle, doubled.
    assert model().layer_s(BatchShape(prefills=((3, 5),)))[1] == 0.5 * (9 + 2 * 3 * 5)


def test_history_is_worked_off_at_the_last_slope():
    steep_then_flat = Table(xs=(0.0, 9.0, 10.0), ys=(0.0, 18.0, 18.5))
    found = model(attn=steep_then_flat).layer_s(BatchShape(prefills=((3, 5),)))
    assert found[1] == 18.0 + 0.5 * 2 * 3 * 5


def test_history_factor_weighs_history_only():
    slow = model(history_factor=Table(xs=(1.0,), ys=(1.5,)))
    assert slow.layer_s(BatchShape(prefills=((3, 5),)))[1] == 0.5 * (9 + 1.5 * 2 * 3 * 5)
    assert slow.layer_s(BatchShape(prefills=((3, 0),)))[1] == 0.5 * 9


def test_attention_is_no_faster_than_reading_the_kv_once():
    slow = model(kv_read_s=9.0)
    assert slow.layer_s(BatchShape(prefills=((3, 5),)))[1] == 9.0 * 8


def test_one_call_attends_for_all_requests_of_a_pass():
    """Eight short prompts in one pass on one H100 took 1.2 times as long as one of them."""
    attn, floor = line(0.5, start=3.0), 3.0
    alone, shared = model(attn=attn), model(attn=attn, attn_call_s=floor)
    one = BatchShape(prefills=((96, 0),))
    assert shared.pass_s(one) == alone.pass_s(one)
    two = BatchShape(prefills=((96, 0), (512, 1000)))
    less_s = shared.layers * floor
    assert shared.pass_s(two) == pytest.approx(alone.pass_s(two) - less_s)
    mixed = BatchShape(prefills=((96, 0),), decodes=4, decode_context_tokens=4000)
    assert shared.pass_s(mixed) == pytest.approx(alone.pass_s(mixed) - less_s)
    small = BatchShape(prefills=((96, 0),), decodes=1, decode_context_tokens=1)
    assert shared.pass_s(small) == pytest.approx(  # decodes that take less than a call are free
        alone.pass_s(small) - shared.layers * alone.decode_attn.at(1, 1)
    )


def test_decode_attention_mixes_neighbouring_batches():
    attn = model().decode_attn
    assert [attn.at(batch, 6) for batch in (1, 2, 3)] == [6.0, 8.0, 10.0]
    assert attn.at(6, 6) == 2 * (4 + 3)  # twice the largest batch, each half with half the context


def test_a_decode_step_is_a_pass_of_decodes():
    batch = BatchShape(decodes=2, decode_context_tokens=6)
    assert model().decode_step_s(2, 6) == model().pass_s(batch) == 100 + 2 * (28 + 8) + 20


def test_kvp_divides_the_history_and_adds_rounds():
    shared = model(kvp_message_s=0.25, kvp_token_s=0.125)
    # Degree 4: q out, then a tree of two rounds; 3 query tokens.
    merge_s = 3 * (0.25 + 0.125 * 3)
    assert shared.merge_s(3, 4) == merge_s
    assert shared.merge_s(3, 1) == 0.0
    assert shared.merge_s(3, 3) == merge_s  # three leaves need two rounds as well
    alone = shared.layer_s(BatchShape(prefills=((3, 8),)), kvp=4)
    assert alone[1] == 0.5 * (9 + 2 * 3 * 2) + merge_s
    assert shared.decode_step_s(1, 8, kvp=2) == 100 + 2 * (14 + 4 + 2 * (0.25 + 0.125)) + 10


def test_kvp_leaves_decodes_beside_it_alone():
    batch = BatchShape(prefills=((3, 8),), decodes=1, decode_context_tokens=7)
    without = BatchShape(prefills=((3, 8),))
    assert model().layer_s(batch, kvp=4)[1] - model().layer_s(without, kvp=4)[1] == 7.0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": 0}, "operators.layers is 0"),
        ({"overhead_s": -1.0}, "operators.overhead_s is -1.0"),
        ({"kv_read_s": float("inf")}, "operators.kv_read_s is inf"),
    ],
)
def test_bad_models_are_refused(changed, message):
    with pytest.raises(ConfigError, match=message):
        model(**changed)


@pytest.mark.parametrize("batches", [(), (1, 1), (0, 1)])
def test_bad_batches_are_refused(batches):
    with pytest.raises(ConfigError, match="decode attention"):
        DecodeAttention(batches=batches, tables=(line(1.0),) * len(batches))


@given(
    st.sampled_from(profile_names()),
    st.lists(st.tuples(st.integers(1, 8192), st.integers(0, 2_000_000)), max_size=4),
    st.integers(0, 600),
    st.integers(0, 10_000),
    st.sampled_from([1, 2, 4, 8]),
)
def test_a_pass_adds_up_from_its_operators(name, prefills, decodes, context_each, kvp):
    operators = load_profile(name).operators
    batch = BatchShape(
        prefills=tuple(prefills), decodes=decodes, decode_context_tokens=decodes * context_each
    )
    if not prefills and not decodes:
        return
    parts_s = operators.layers * sum(operators.layer_s(batch, kvp))
    rest_s = operators.overhead_s + operators.lm_head.at(decodes + len(prefills))
    assert operators.pass_s(batch, kvp) == pytest.approx(parts_s + rest_s)
