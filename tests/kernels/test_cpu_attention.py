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
from support.cpu_kernels import KERNELS, using

pytestmark = pytest.mark.skipif(not cpu_backend.AVAILABLE, reason="the C++ module isn't built here")
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)

MANY = (33, 70, 130)
"""Query rows of a chunk: some tiles, the last one short."""


@pytest.fixture(params=KERNELS)
def kernels(request) -> Iterator[None]:
    """Uses each of the kernels in turn."""
    with using(request.param):
        yield


@settings(max_examples=20)
@given(call=calls(), count=st.sampled_from([1, 2]))
def test_any_call_matches_the_reference(threads, call, count):
    torch.set_num_threads(count)
    assert_matches_reference(call, *KERNELS)


@DTYPES
@pytest.mark.parametrize("layout", ["plain", "zigzag", "striped", "shard", "shuffled"])
@pytest.mark.parametrize("window", [None, 40])
def test_chunks_anywhere(layout, window, dtype):
    call = Call(q_lens=MANY, kv_lens=(600, 70, 1100), layout=layout, window=window, dtype=dtype)
    assert_matches_reference(call, *KERNELS)


@pytest.mark.parametrize("head_dim", [32, 33, 57, 80, 128, 255, 256])
@DTYPES
def test_head_dims_that_fill_no_vector(head_dim, dtype):
    call = Call(q_lens=(1, 20), kv_lens=(90, 270), head_dim=head_dim, dtype=dtype, page_tokens=7)
    assert_matches_reference(call, *KERNELS)


@DTYPES
def test_a_long_history_is_cut_and_joined(threads, dtype):
    """Few tiles and much K/V: the spans of each tile are tasks of their own."""
    torch.set_num_threads(2)
    call = Call(q_lens=(12,), kv_lens=(9000,), kv_heads=1, dtype=dtype)
    assert_matches_reference(call, *KERNELS)


@pytest.mark.parametrize("kv_heads", [1, 3, 5])
@pytest.mark.parametrize("head_dim", [48, 80, 264])
@DTYPES
def test_decode_takes_some_kv_heads_at_a_time(kv_heads, head_dim, dtype):
    call = Call(
        q_lens=(1, 2, 1), kv_lens=(300, 129, 31), kv_heads=kv_heads, head_dim=head_dim, dtype=dtype
    )
    assert_matches_reference(call, *KERNELS)


@DTYPES
def test_decode_far_into_a_sequence(threads, dtype):
    """Spans grow with the context."""
    torch.set_num_threads(2)
    call = Call(q_lens=(1, 1), kv_lens=(20_000, 8_300), page_tokens=7, dtype=dtype)
    assert_matches_reference(call, *KERNELS)


@pytest.mark.parametrize("rows", [1, 50])
@pytest.mark.parametrize("soft_cap", [0.7, 30.0])
def test_soft_caps(rows, soft_cap):
    call = Call(q_lens=(rows,), kv_lens=(400,), soft_cap=soft_cap)
    assert_matches_reference(call, *KERNELS)


@pytest.mark.parametrize("scale", [-0.2, 0.0])
@pytest.mark.parametrize("rows", [1, 50])
def test_scales_that_are_not_positive(rows, scale):
    call = Call(q_lens=(rows,), kv_lens=(300,))
    q_nhd, kv_layer = call.data()
    expected = run_attention(call.plan("reference"), q_nhd, kv_layer, scale=scale)
    for name in KERNELS:
        with using(name):
            actual = run_attention(call.plan("cpu"), q_nhd, kv_layer, scale=scale)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_rows_above_all_of_their_shard_see_nothing(kernels):
    call = Call(q_lens=(40,), kv_lens=(500,))
    before = torch.arange(-40, 0, dtype=torch.int32)
    out, lse = attend(call.plan("cpu", q_positions=before), *call.data())
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_bfloat16_partials_in_float32_keep_their_bits(kernels):
    call = Call(q_lens=(1, 40), kv_lens=(300, 700), dtype=torch.bfloat16)
    q_nhd, kv_layer = call.data()
    rounded, _ = run_attention(call.plan("cpu"), q_nhd, kv_layer, scale=0.125)
    wide, _ = attend(call.plan("cpu"), q_nhd, kv_layer)
    assert torch.equal(wide.bfloat16(), rounded)
    assert not torch.equal(wide, rounded.float())


@settings(max_examples=20)
@given(call=calls(longest=1500))
def test_a_sequence_never_notices_its_batch(call):
    q_nhd, kv_layer = call.data()
    q_indptr, kv_lens, page_table = call.tables()
    q_at, kv_at = call.positions()
    slots = torch.tensor([0, *call.kv_lens]).cumsum(0).tolist()
    for name in KERNELS:
        with using(name):
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
                assert torch.equal(out, whole[rows]), name
                assert torch.equal(lse, whole_lse[rows]), name


@DTYPES
def test_how_a_step_is_cut_changes_no_bit(dtype):
    """Alone, the spans of K/V are tasks of their own; among 80 sequences they are not."""
    call = Call(q_lens=(1,) * 80, kv_lens=(2100,) * 80, head_dim=16, kv_heads=1, dtype=dtype)
    q_nhd, kv_layer = call.data()
    _, kv_lens, page_table = call.tables()
    one = {
        "q_indptr": torch.tensor([0, 1], dtype=torch.int32),
        "kv_lens": kv_lens[:1],
        "page_table": page_table[:1],
    }
    for name in KERNELS:
        with using(name):
            together, _ = attend(call.plan("cpu"), q_nhd, kv_layer)
            alone, _ = attend(call.plan("cpu", **one), q_nhd[:1], kv_layer)
        assert torch.equal(alone, together[:1]), name


@pytest.mark.parametrize("rows", [1, 45])
@DTYPES
def test_threads_do_not_change_a_bit(threads, rows, dtype):
    call = Call(q_lens=(rows, 2), kv_lens=(5000, 700), kv_heads=1, dtype=dtype)
    inputs = call.data()
    for name in KERNELS:
        with using(name):
            results = []
            for count in (1, 2, 5):
                torch.set_num_threads(count)
                results.append(attend(call.plan("cpu"), *inputs))
        for out, lse in results[1:]:
            assert torch.equal(out, results[0][0]), name
            assert torch.equal(lse, results[0][1]), name


@pytest.mark.parametrize("out_dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("other_dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [33, 64])
def test_merging_parts_of_the_context(out_dtype, other_dtype, head_dim):
    generator = torch.Generator().manual_seed(1)
    outs = torch.randn(2, 3000, 3, head_dim, generator=generator)
    lses = 5 * torch.randn(2, 3000, 3, generator=generator)
    lses[0, :7] = lses[1, 5:9] = -torch.inf
    outs[lses == -torch.inf] = 0
    first, other = outs[0].to(out_dtype), outs[1].to(other_dtype)
    shares = lses.double().softmax(0).nan_to_num()[..., None]
    expected = shares[0] * first.double() + shares[1] * other.double()
    for name in KERNELS:
        out, lse = first.clone(), lses[0].clone()
        with using(name):
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
