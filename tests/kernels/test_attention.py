"""Paged attention: every backend and instruction set against the float64 reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_kernels import cpu_backend, reference
from millrace_kernels.api import merge_attention_, plan_attention, run_attention
from support.attention_calls import TOLERANCE, Call, assert_matches_reference, attend, calls
from support.cpu_kernels import BACKENDS, using

NATIVE = pytest.mark.skipif(not cpu_backend.AVAILABLE, reason="the C++ module isn't built here")
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
DETERMINISTIC = [name for name in BACKENDS if not name.startswith("fast")]


@pytest.fixture(params=BACKENDS)
def backend(request) -> Iterator[str]:
    """Yields each backend, and `cpu` once for each of its kernels."""
    with using(request.param) as name:
        yield name


@settings(max_examples=20)
@given(call=calls())
def test_any_shape_matches_the_reference(call):
    """Calls torch; `test_cpu_attention.py` does the same with C++."""
    assert_matches_reference(call, "torch")


@DTYPES
@pytest.mark.parametrize("window", [None, 1, 17, 300])
def test_decode_and_prefill_rows_share_a_batch(window, dtype):
    call = Call(
        q_lens=(1, 70, 1, 130, 9), kv_lens=(513, 400, 1, 130, 900), window=window, dtype=dtype
    )
    assert_matches_reference(call, *BACKENDS, "auto")


@DTYPES
@pytest.mark.parametrize("window", [None, 450, 2000])
@pytest.mark.parametrize("layout", ["named", "behind"])
def test_rows_with_positions_that_need_no_mask(layout, window, dtype):
    """Attends as a KVP worker and the KV owner of a long context do."""
    lens = {"q_lens": (1, 70, 130, 9), "kv_lens": (513, 400, 130, 900)}
    call = Call(**lens, window=window, layout=layout, dtype=dtype)
    assert_matches_reference(call, *BACKENDS, "auto")


@DTYPES
@pytest.mark.parametrize("window", [None, 700])
def test_a_row_has_the_same_bits_in_any_chunk(deterministic, window, dtype):
    """Decode is the chunk of one row; the chunks end inside and at the ends of spans."""
    length = 1100
    call = Call(q_lens=(length,), kv_lens=(length,), window=window, dtype=dtype, kv_heads=1)
    q_nhd, kv_layer = call.data()
    ends = (1, 8, 9, 511, 512, 513, 700, 1023, 1025, 1090, *range(1091, length + 1))
    for name in DETERMINISTIC:
        with using(name) as backend:
            whole = attend(call.plan(backend), q_nhd, kv_layer)
            for start, end in (*pairwise((0, *ends)), (0, 1024), (1024, length)):
                tables = {"q_indptr": _int32(0, end - start), "kv_lens": _int32(end)}
                chunk = attend(call.plan(backend, **tables), q_nhd[start:end], kv_layer)
                assert torch.equal(chunk[0], whole[0][start:end]), name
                assert torch.equal(chunk[1], whole[1][start:end]), name


@settings(max_examples=12)
@given(data=st.data(), seed=st.integers(0, 99))
def test_a_row_never_notices_its_company(deterministic, data, seed):
    lens = data.draw(st.lists(st.integers(1, 700), min_size=1, max_size=6))
    rows = [data.draw(st.integers(1, min(length, 40))) for length in lens]
    call = Call(q_lens=tuple(rows), kv_lens=tuple(lens), seed=seed, head_dim=32)
    q_nhd, kv_layer = call.data()
    starts, kv_lens, page_table = call.tables()
    for name in DETERMINISTIC:
        with using(name) as backend:
            together = attend(call.plan(backend), q_nhd, kv_layer)
            for index, row in enumerate(starts[1:].tolist()):
                alone = call.plan(
                    backend,
                    q_indptr=_int32(0, 1),
                    kv_lens=kv_lens[index : index + 1],
                    page_table=page_table[index : index + 1],
                )
                out, lse = attend(alone, q_nhd[row - 1 : row], kv_layer)  # a sequence's last row
                assert torch.equal(out, together[0][row - 1 : row]), name
                assert torch.equal(lse, together[1][row - 1 : row]), name


def _int32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_many_heads_over_one_kv_head():
    call = Call(q_lens=(1, 3), kv_lens=(600, 40), kv_heads=1, group=40)
    assert_matches_reference(call, *BACKENDS)


def test_rows_that_see_nothing_are_zero_with_an_infinite_lse(backend):
    out, lse = Call(q_lens=(1, 2, 1), kv_lens=(5, 0, 7)).run(backend)
    assert (out[1:3] == 0).all()
    assert (lse[1:3] == float("-inf")).all()
    assert lse[0].isfinite().all() and lse[3].isfinite().all()


def test_large_scores_do_not_overflow(backend):
    call = Call(q_lens=(1, 20), kv_lens=(700, 300))
    q_nhd, kv_layer = call.data()
    results = [attend(call.plan(name), q_nhd * 80, kv_layer) for name in ("reference", backend)]
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=1e-3)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-5, atol=0)


def test_a_nan_is_never_hidden(backend):
    call = Call(q_lens=(1,), kv_lens=(100,))
    q_nhd, kv_layer = call.data()
    kv_layer[:, 0, 0, 3] = torch.nan
    out, _ = attend(call.plan(backend), q_nhd, kv_layer)
    assert out[0, : call.group].isnan().all()
    assert out[0, call.group :].isfinite().all()


def test_strided_queries_and_a_given_output(backend):
    call = Call(q_lens=(1, 6), kv_lens=(40, 30))
    q_nhd, kv_layer = call.data()
    fused = torch.cat([q_nhd, torch.randn(q_nhd.shape)], 1)
    expected, _ = attend(call.plan("reference"), q_nhd, kv_layer)
    out, _ = attend(call.plan(backend), fused[:, : call.heads], kv_layer)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


@NATIVE
@DTYPES
def test_a_sequence_gets_the_same_bits_in_any_batch_and_on_any_threads(dtype, threads):
    call = Call(q_lens=(1, 1, 1, 4, 90), kv_lens=(1500, 3, 257, 800, 700), dtype=dtype)
    q_nhd, kv_layer = call.data()
    q_indptr, kv_lens, page_table = call.tables()
    torch.set_num_threads(1)
    whole, whole_lse = attend(call.plan(), q_nhd, kv_layer)
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        for i in range(len(kv_lens)):
            rows = slice(int(q_indptr[i]), int(q_indptr[i + 1]))
            alone = call.plan(
                q_indptr=torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
                kv_lens=kv_lens[i : i + 1],
                page_table=page_table[i : i + 1],
            )
            out, lse = attend(alone, q_nhd[rows], kv_layer)
            assert torch.equal(out, whole[rows])
            assert torch.equal(lse, whole_lse[rows])


@NATIVE
def test_a_plan_serves_every_layer(threads):
    torch.set_num_threads(3)
    call = Call(q_lens=(1, 1), kv_lens=(1000, 600))
    q_nhd, kv_layer = call.data()
    plan = call.plan()
    first, _ = run_attention(plan, q_nhd, kv_layer, scale=0.125)
    for _ in range(200):
        assert torch.equal(run_attention(plan, q_nhd, kv_layer, scale=0.125)[0], first)
    other, _ = run_attention(plan, q_nhd, kv_layer * 2, scale=0.125)
    assert not torch.equal(other, first)


@DTYPES
@pytest.mark.parametrize("ways", [2, 3])
def test_a_ring_over_zigzag_blocks_is_attention_over_everything(backend, ways, dtype):
    """Each rank has a head and a tail block; over all steps it has seen all K/V (Tetris 4.1)."""
    tokens = 2 * ways * 37
    whole = Call(q_lens=(tokens,), kv_lens=(tokens,), dtype=dtype, page_tokens=8)
    q_nhd, kv_layer = whole.data()
    expected, expected_lse = attend(whole.plan("reference"), q_nhd, kv_layer)
    pages = whole.tables()[2][0].long()
    kv_2ktd = kv_layer[pages].permute(1, 2, 0, 3, 4).flatten(2, 3)[:, :, :tokens]
    blocks = torch.arange(tokens).chunk(2 * ways)
    owned = [torch.cat([blocks[r], blocks[2 * ways - 1 - r]]) for r in range(ways)]
    for rank in range(ways):
        rows = owned[rank]
        out = torch.zeros(len(rows), whole.heads, whole.head_dim)
        lse = torch.full((len(rows), whole.heads), -torch.inf)
        for step in range(ways):
            slots = owned[(rank - step) % ways]
            ring = torch.zeros(-(-len(slots) // 8), 2, whole.kv_heads, 8, 64, dtype=dtype)
            for slot, position in enumerate(slots.tolist()):
                ring[slot // 8, :, :, slot % 8] = kv_2ktd[:, :, position]
            plan = whole.plan(
                backend,
                q_indptr=torch.tensor([0, len(rows)], dtype=torch.int32),
                kv_lens=torch.tensor([len(slots)], dtype=torch.int32),
                page_table=torch.arange(len(ring), dtype=torch.int32)[None],
                q_positions=rows.int(),
                kv_positions=slots.int(),
            )
            merge_attention_(out, lse, *attend(plan, q_nhd[rows], ring))
        torch.testing.assert_close(out, expected[rows], rtol=0, atol=TOLERANCE[dtype])
        torch.testing.assert_close(lse, expected_lse[rows], rtol=1e-5, atol=1e-2)


@pytest.mark.parametrize("out_dtype", TOLERANCE, ids=str)
def test_merging_with_rows_that_saw_nothing(out_dtype):
    generator = torch.Generator().manual_seed(0)
    out, other = torch.randn(2, 4, 3, 40, generator=generator)
    lse, other_lse = torch.randn(2, 4, 3, generator=generator)
    lse[0] = other_lse[1] = -torch.inf
    lse[2] = other_lse[2] = -torch.inf
    out[0], out[2], other[1], other[2] = 0, 0, 0, 0
    merged, merged_lse = out.clone().to(out_dtype), lse.clone()
    merge_attention_(merged, merged_lse, other, other_lse)
    expected, expected_lse = reference.merge_attention(out.to(out_dtype), lse, other, other_lse)
    torch.testing.assert_close(merged.double(), expected, rtol=0, atol=TOLERANCE[out_dtype])
    torch.testing.assert_close(merged_lse, expected_lse, rtol=1e-6, atol=1e-6)
    assert (merged[2] == 0).all() and (merged_lse[2] == -torch.inf).all()
    torch.testing.assert_close(merged[0].float(), other[0], rtol=0, atol=TOLERANCE[out_dtype])


def test_long_contexts_of_single_rows():
    """Uses 300 pages, and a row near each end of them."""
    call = Call(q_lens=(1, 1), kv_lens=(300 * 16, 300 * 16 - 15))
    assert_matches_reference(call, *BACKENDS)
    assert_matches_reference(replace(call, layout="striped"), *BACKENDS)


class TestBadInput:
    """Plans and runs refuse bad inputs: none may reach memory outside the pool."""

    def plan(self, **changes):
        arguments = {
            "q_indptr": torch.tensor([0, 1, 3], dtype=torch.int32),
            "kv_lens": torch.tensor([5, 9], dtype=torch.int32),
            "page_table": torch.tensor([[0, 1, 2], [3, 4, 5]], dtype=torch.int32),
            "page_tokens": 4,
            "num_q_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 32,
            "dtype": torch.float32,
            "device": "cpu",
        }
        return plan_attention(**{**arguments, **changes})

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"q_indptr": torch.tensor([0, 1, 3])}, "q_indptr must be int32"),
            ({"q_indptr": torch.tensor([0, 1], dtype=torch.int32)}, "2 entries"),
            ({"q_indptr": torch.tensor([1, 1, 3], dtype=torch.int32)}, "start at 0"),
            ({"q_indptr": torch.tensor([0, 2, 1], dtype=torch.int32)}, "falls at sequence 1"),
            ({"kv_lens": torch.tensor([5, 13], dtype=torch.int32)}, r"kv_lens\[1\] = 13"),
            ({"kv_lens": torch.tensor([5, 1], dtype=torch.int32)}, "2 queries for 1 K/V"),
            ({"num_q_heads": 3}, "not a multiple"),
            ({"sliding_window": 0}, "at least 1"),
            ({"soft_cap": 0.0}, "soft_cap must be above 0"),
            ({"q_positions": torch.tensor([1, 2], dtype=torch.int32)}, "q_positions has 2 entries"),
            ({"kv_positions": torch.tensor([1, 2], dtype=torch.int32)}, "entries for 14 rows"),
            ({"kv_positions": torch.arange(14)}, "kv_positions must be int32"),
            ({"backend": "fast"}, "not a valid Backend"),
        ],
    )
    def test_tables_that_disagree(self, changes, message):
        with pytest.raises(ValueError, match=message):
            self.plan(**changes)

    def test_shapes_that_do_not_fit_the_plan(self):
        plan = self.plan()
        q_nhd, kv_layer = torch.zeros(3, 4, 32), torch.zeros(6, 2, 2, 4, 32)
        with pytest.raises(ValueError, match="q is"):
            run_attention(plan, q_nhd[:2], kv_layer, scale=1.0)
        with pytest.raises(ValueError, match="the plan on cpu"):
            run_attention(plan, q_nhd, kv_layer.to("meta"), scale=1.0)
        with pytest.raises(ValueError, match="kv_layer's pages"):
            run_attention(plan, q_nhd, kv_layer[:, :, :1], scale=1.0)
        with pytest.raises(ValueError, match="out is"):
            run_attention(plan, q_nhd, kv_layer, scale=1.0, out=q_nhd[:2])
        with pytest.raises(ValueError, match="lse_out is"):
            run_attention(plan, q_nhd, kv_layer, scale=1.0, lse_out=q_nhd[:, :, 0].double())

    @NATIVE
    def test_pages_outside_the_pool(self):
        q_nhd, kv_layer = torch.zeros(3, 4, 32), torch.zeros(5, 2, 2, 4, 32)
        with pytest.raises(IndexError, match="page 5 is past the pool's 5"):
            run_attention(self.plan(), q_nhd, kv_layer, scale=1.0)
        with pytest.raises(IndexError, match="page -1"):
            self.plan(page_table=torch.tensor([[0, -1, 2], [3, 4, 5]], dtype=torch.int32))

    def test_a_dtype_that_only_torch_can_do(self):
        assert self.plan(dtype=torch.float16).backend == "torch"
        with pytest.raises(ValueError, match="backend 'cpu': it can't do"):
            self.plan(dtype=torch.float16, backend="cpu")
