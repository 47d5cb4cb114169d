"""The C++ attention kernels, fast and deterministic, under each instruction set of this machine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_kernels import cpu_backend
from millrace_kernels.api import merge_attention_, plan_attention, run_attention
from support.attention_calls import TOLERANCE, Call, assert_matches_reference, attend, calls

pytestmark = [
    pytest.mark.skipif(not cpu_backend.AVAILABLE, reason="the C++ module isn't built here"),
    pytest.mark.usefixtures("either_order"),
]

MANY = (33, 70, 300)
"""Query rows of a chunk: some tiles, the last one short."""


@pytest.fixture(params=cpu_backend.instruction_sets())
def instruction_set(request) -> Iterator[str]:
    with cpu_backend.instruction_set(request.param):
        yield request.param


@pytest.fixture(params=[1, 2])
def threads(request) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


@settings(max_examples=15)
@given(call=calls(longest=3000))
def test_any_call_matches_the_reference(instruction_set, threads, call):
    assert_matches_reference(call, "cpu")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layout", ["plain", "zigzag", "striped", "shard", "shuffled"])
@pytest.mark.parametrize("window", [None, 40])
def test_chunks_anywhere(instruction_set, layout, window, dtype):
    call = Call(q_lens=MANY, kv_lens=(600, 70, 1100), layout=layout, window=window, dtype=dtype)
    assert_matches_reference(call, "cpu")


@pytest.mark.parametrize("head_dim", [32, 33, 57, 80, 128, 255, 256])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_head_dims_that_fill_no_vector(instruction_set, head_dim, dtype):
    call = Call(q_lens=(1, 20), kv_lens=(90, 270), head_dim=head_dim, dtype=dtype, page_tokens=7)
    assert_matches_reference(call, "cpu")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_long_history_is_cut_and_joined(instruction_set, threads, dtype):
    """Few tiles and much K/V: the spans of each tile are tasks of their own."""
    call = Call(q_lens=(12,), kv_lens=(9000,), kv_heads=1, dtype=dtype)
    assert_matches_reference(call, "cpu")


@pytest.mark.parametrize("kv_heads", [1, 3, 5])
@pytest.mark.parametrize("head_dim", [48, 80, 264])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_decode_takes_some_kv_heads_at_a_time(instruction_set, kv_heads, head_dim, dtype):
    call = Call(
        q_lens=(1, 2, 1), kv_lens=(300, 129, 31), kv_heads=kv_heads, head_dim=head_dim, dtype=dtype
    )
    assert_matches_reference(call, "cpu")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_decode_far_into_a_sequence(instruction_set, threads, dtype):
    """Spans grow with the context."""
    call = Call(q_lens=(1, 1), kv_lens=(20_000, 8_300), page_tokens=7, dtype=dtype)
    assert_matches_reference(call, "cpu")


@pytest.mark.parametrize("rows", [1, 50])
@pytest.mark.parametrize("soft_cap", [0.7, 30.0])
def test_soft_caps(instruction_set, rows, soft_cap):
    call = Call(q_lens=(rows,), kv_lens=(400,), soft_cap=soft_cap)
    assert_matches_reference(call, "cpu")


@pytest.mark.parametrize("scale", [-0.2, 0.0])
@pytest.mark.parametrize("rows", [1, 50])
def test_scales_that_are_not_positive(instruction_set, rows, scale):
    call = Call(q_lens=(rows,), kv_lens=(300,))
    q_nhd, kv_layer = call.data()
    expected = run_attention(call.plan("reference"), q_nhd, kv_layer, scale=scale)
    actual = run_attention(call.plan("cpu"), q_nhd, kv_layer, scale=scale)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_rows_above_all_of_their_shard_see_nothing(instruction_set):
    call = Call(q_lens=(40,), kv_lens=(500,))
    before = torch.arange(-40, 0, dtype=torch.int32)
    out, lse = attend(call.plan("cpu", q_positions=before), *call.data())
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_bfloat16_partials_in_float32_keep_their_bits(instruction_set):
    call = Call(q_lens=(1, 40), kv_lens=(300, 700), dtype=torch.bfloat16)
    q_nhd, kv_layer = call.data()
    rounded, _ = run_attention(call.plan("cpu"), q_nhd, kv_layer, scale=0.125)
    wide, _ = attend(call.plan("cpu"), q_nhd, kv_layer)
    assert torch.equal(wide.bfloat16(), rounded)
    assert not torch.equal(wide, rounded.float())


@settings(max_examples=15)
@given(data=st.data())
def test_a_sequence_never_notices_its_batch(instruction_set, data):
    call = data.draw(calls(longest=1500))
    q_nhd, kv_layer = call.data()
    q_indptr, kv_lens, page_table = call.tables()
    q_at, kv_at = call.positions()
    slots = torch.tensor([0, *call.kv_lens]).cumsum(0).tolist()
    whole, whole_lse = attend(call.plan("cpu"), q_nhd, kv_layer)
    for i in range(len(kv_lens)):
        rows = slice(int(q_indptr[i]), int(q_indptr[i + 1]))
        alone = call.plan(
            "cpu",
            q_indptr=torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
            kv_lens=kv_lens[i : i + 1],
            page_table=page_table[i : i + 1],
            q_positions=None if q_at is None else q_at[rows],
            kv_positions=None if kv_at is None else kv_at[slots[i] : slots[i + 1]],
        )
        out, lse = attend(alone, q_nhd[rows], kv_layer)
        assert torch.equal(out, whole[rows])
        assert torch.equal(lse, whole_lse[rows])


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_how_a_step_is_cut_changes_no_bit(instruction_set, dtype):
    """Alone, the spans of K/V are tasks of their own; among 80 sequences they are not."""
    call = Call(q_lens=(1,) * 80, kv_lens=(2100,) * 80, head_dim=16, kv_heads=1, dtype=dtype)
    q_nhd, kv_layer = call.data()
    _, kv_lens, page_table = call.tables()
    together, _ = attend(call.plan("cpu"), q_nhd, kv_layer)
    alone = call.plan(
        "cpu",
        q_indptr=torch.tensor([0, 1], dtype=torch.int32),
        kv_lens=kv_lens[:1],
        page_table=page_table[:1],
    )
    assert torch.equal(attend(alone, q_nhd[:1], kv_layer)[0], together[:1])


@pytest.mark.parametrize("rows", [1, 45])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_threads_do_not_change_a_bit(instruction_set, rows, dtype):
    call = Call(q_lens=(rows, 2), kv_lens=(5000, 700), kv_heads=1, dtype=dtype)
    before = torch.get_num_threads()
    results = []
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        results.append(call.run("cpu"))
    torch.set_num_threads(before)
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse, results[0][1])


@pytest.mark.parametrize("out_dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("other_dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [33, 64])
def test_merging_parts_of_the_context(instruction_set, out_dtype, other_dtype, head_dim):
    call = Call(q_lens=(3000,), kv_lens=(16,), head_dim=head_dim, kv_heads=1, layout="shard")
    q_nhd, _ = call.data()
    generator = torch.Generator().manual_seed(1)
    outs = torch.randn(2, *q_nhd.shape, generator=generator)
    lses = 5 * torch.randn(2, *q_nhd.shape[:2], generator=generator)
    lses[0, :7] = lses[1, 5:9] = -torch.inf
    outs[lses == -torch.inf] = 0
    out, other = outs[0].to(out_dtype), outs[1].to(other_dtype)
    lse = lses[0].clone()
    shares = lses.double().softmax(0).nan_to_num()[..., None]
    expected = shares[0] * out.double() + shares[1] * other.double()
    merge_attention_(out, lse, other, lses[1])
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=TOLERANCE[out_dtype])
    torch.testing.assert_close(lse, lses.double().logsumexp(0).float(), rtol=1e-6, atol=1e-6)


def test_a_plan_keeps_the_tables_it_reads_in_place():
    call = Call(q_lens=(1, 60), kv_lens=(800, 900), layout="shuffled")
    q_nhd, kv_layer = call.data()
    expected = attend(call.plan("reference"), q_nhd, kv_layer)
    plans = [call.plan("cpu") for _ in range(50)]  # each with tables of its own
    for plan in plans:
        torch.testing.assert_close(attend(plan, q_nhd, kv_layer), expected, rtol=1e-5, atol=1e-5)


def test_a_page_number_below_zero_is_refused():
    with pytest.raises(IndexError, match="page -3"):
        plan_attention(
            q_indptr=torch.tensor([0, 40], dtype=torch.int32),
            kv_lens=torch.tensor([64], dtype=torch.int32),
            page_table=torch.tensor([[0, 1, -3, 2]], dtype=torch.int32),
            page_tokens=16,
            num_q_heads=2,
            num_kv_heads=1,
            head_dim=64,
            dtype=torch.float32,
            device="cpu",
            backend="cpu",
        )
