"""Paged attention: every backend and instruction set against the float64 reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace_kernels import cpu_backend
from millrace_kernels.api import plan_attention, run_attention

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
NATIVE = pytest.mark.skipif(not cpu_backend.AVAILABLE, reason="the C++ module isn't built here")


@dataclass(frozen=True)
class Call:
    """Lengths of a ragged batch and the shapes of one attention call over it."""

    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    kv_heads: int = 2
    group: int = 3
    head_dim: int = 64
    page_tokens: int = 16
    window: int | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def tables(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q_indptr, kv_lens and a page table that scatters each sequence over the pool."""
        needed = [-(-n // self.page_tokens) for n in self.kv_lens]
        order = torch.randperm(sum(needed), generator=self._generator()).tolist()
        table = torch.full((len(needed), max([1, *needed])), -1, dtype=torch.int32)
        for row, count in enumerate(needed):
            table[row, :count] = torch.tensor([order.pop() for _ in range(count)])
        indptr = torch.tensor([0, *self.q_lens]).cumsum(0).int()
        return indptr, torch.tensor(self.kv_lens, dtype=torch.int32), table

    def data(self) -> tuple[torch.Tensor, torch.Tensor]:
        """q_nhd and kv_layer, with a pool of just the pages that are used."""
        pages = max(1, sum(-(-n // self.page_tokens) for n in self.kv_lens))
        generator = self._generator()
        q_nhd = torch.randn(sum(self.q_lens), self.heads, self.head_dim, generator=generator)
        shape = (pages, 2, self.kv_heads, self.page_tokens, self.head_dim)
        kv_layer = torch.randn(shape, generator=generator)
        return q_nhd.to(self.dtype), kv_layer.to(self.dtype)

    def run(self, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        return attend(self, backend, self.tables(), *self.data())

    def _generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed)


def attend(call, backend, tables, q_nhd, kv_layer):
    """out_nhd in float32, and lse_nh."""
    q_indptr, kv_lens, page_table = tables
    plan = plan_attention(
        q_indptr=q_indptr,
        kv_lens=kv_lens,
        page_table=page_table,
        page_tokens=call.page_tokens,
        num_q_heads=call.heads,
        num_kv_heads=call.kv_heads,
        head_dim=call.head_dim,
        dtype=call.dtype,
        device="cpu",
        sliding_window=call.window,
        backend=backend,
    )
    lse_nh = torch.full(q_nhd.shape[:2], torch.nan)
    out_nhd, _ = run_attention(plan, q_nhd, kv_layer, scale=call.head_dim**-0.5, lse_out=lse_nh)
    return out_nhd.float(), lse_nh


def assert_matches_reference(call: Call, backend: str) -> None:
    expected, expected_lse = call.run("reference")
    out, lse = call.run(backend)
    tolerance = TOLERANCE[call.dtype]
    torch.testing.assert_close(out, expected, rtol=0, atol=tolerance)
    torch.testing.assert_close(lse, expected_lse, rtol=1e-5, atol=tolerance / 2)


@pytest.fixture(params=["torch", *cpu_backend.instruction_sets()])
def backend(request) -> Iterator[str]:
    """Each backend; `cpu` once for each instruction set that this machine runs."""
    if request.param == "torch":
        yield "torch"
        return
    with cpu_backend.instruction_set(request.param):
        yield "cpu"


@pytest.fixture
def threads() -> Iterator[None]:
    """Let a test set torch's thread count."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@st.composite
def calls(draw) -> Call:
    kv_lens = draw(st.lists(st.integers(0, 2000) | st.integers(0, 70), min_size=1, max_size=4))
    most_rows = st.sampled_from([1, 1, 5, 40, 200])
    q_lens = [draw(st.integers(0, min(n, draw(most_rows)))) if n else 1 for n in kv_lens]
    return Call(
        q_lens=tuple(q_lens),
        kv_lens=tuple(kv_lens),
        kv_heads=draw(st.integers(1, 3)),
        group=draw(st.sampled_from([1, 2, 3, 5, 7])),
        head_dim=draw(st.sampled_from([32, 40, 64, 80, 96, 128, 192, 256])),
        page_tokens=draw(st.integers(1, 64)),
        window=draw(st.none() | st.integers(1, 300)),
        dtype=draw(st.sampled_from([torch.float32, torch.bfloat16])),
        seed=draw(st.integers(0, 2**31)),
    )


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(call=calls())
def test_any_shape_matches_the_reference(backend, call):
    assert_matches_reference(call, backend)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("window", [None, 1, 17, 300])
def test_decode_and_prefill_rows_share_a_batch(backend, window, dtype):
    call = Call(
        q_lens=(1, 70, 1, 300, 9), kv_lens=(513, 400, 1, 300, 900), window=window, dtype=dtype
    )
    assert_matches_reference(call, backend)
    assert_matches_reference(call, "auto")


def test_many_heads_over_one_kv_head(backend):
    assert_matches_reference(Call(q_lens=(1, 3), kv_lens=(600, 40), kv_heads=1, group=40), backend)


def test_rows_that_see_nothing_are_zero_with_an_infinite_lse(backend):
    out, lse = Call(q_lens=(1, 2, 1), kv_lens=(5, 0, 7)).run(backend)
    assert (out[1:3] == 0).all()
    assert (lse[1:3] == float("-inf")).all()
    assert lse[0].isfinite().all() and lse[3].isfinite().all()


def test_large_scores_do_not_overflow(backend):
    call = Call(q_lens=(1, 20), kv_lens=(700, 300))
    q_nhd, kv_layer = call.data()
    results = [
        attend(call, name, call.tables(), q_nhd * 80, kv_layer) for name in ("reference", backend)
    ]
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=1e-3)
    torch.testing.assert_close(results[1][1], results[0][1], rtol=1e-5, atol=0)


def test_a_nan_is_never_hidden(backend):
    call = Call(q_lens=(1,), kv_lens=(100,))
    q_nhd, kv_layer = call.data()
    kv_layer[:, 0, 0, 3] = torch.nan
    out, _ = attend(call, backend, call.tables(), q_nhd, kv_layer)
    assert out[0, : call.group].isnan().all()
    assert out[0, call.group :].isfinite().all()


def test_strided_queries_and_a_given_output(backend):
    call = Call(q_lens=(1, 6), kv_lens=(40, 30))
    q_nhd, kv_layer = call.data()
    fused = torch.cat([q_nhd, torch.randn(q_nhd.shape)], 1)
    expected, _ = attend(call, "reference", call.tables(), q_nhd, kv_layer)
    out, _ = attend(call, backend, call.tables(), fused[:, : call.heads], kv_layer)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-5)


@NATIVE
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_sequence_gets_the_same_bits_in_any_batch_and_on_any_threads(dtype, threads):
    call = Call(q_lens=(1, 1, 1, 4), kv_lens=(1500, 3, 257, 800), dtype=dtype)
    q_nhd, kv_layer = call.data()
    q_indptr, kv_lens, page_table = call.tables()
    torch.set_num_threads(1)
    whole, whole_lse = attend(call, "auto", (q_indptr, kv_lens, page_table), q_nhd, kv_layer)
    for count in (1, 2, 5):
        torch.set_num_threads(count)
        for i in range(len(kv_lens)):
            rows = slice(int(q_indptr[i]), int(q_indptr[i + 1]))
            alone = (
                torch.tensor([0, rows.stop - rows.start], dtype=torch.int32),
                kv_lens[i : i + 1],
                page_table[i : i + 1],
            )
            out, lse = attend(call, "auto", alone, q_nhd[rows], kv_layer)
            assert torch.equal(out, whole[rows])
            assert torch.equal(lse, whole_lse[rows])


@NATIVE
def test_a_plan_serves_every_layer(threads):
    torch.set_num_threads(3)
    call = Call(q_lens=(1, 1), kv_lens=(1000, 600))
    q_nhd, kv_layer = call.data()
    q_indptr, kv_lens, page_table = call.tables()
    plan = plan_attention(
        q_indptr=q_indptr,
        kv_lens=kv_lens,
        page_table=page_table,
        page_tokens=call.page_tokens,
        num_q_heads=call.heads,
        num_kv_heads=call.kv_heads,
        head_dim=call.head_dim,
        dtype=call.dtype,
        device="cpu",
    )
    first, _ = run_attention(plan, q_nhd, kv_layer, scale=0.125)
    for _ in range(200):
        assert torch.equal(run_attention(plan, q_nhd, kv_layer, scale=0.125)[0], first)
    other, _ = run_attention(plan, q_nhd, kv_layer * 2, scale=0.125)
    assert not torch.equal(other, first)


class TestBadInput:
    """What plans and runs refuse; nothing may reach memory outside the pool."""

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
            ({"num_q_heads": 3}, "no multiple"),
            ({"sliding_window": 0}, "at least 1"),
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
        with pytest.raises(ValueError, match="backend 'cpu' can't do"):
            self.plan(dtype=torch.float16, backend="cpu")
