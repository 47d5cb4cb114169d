"""Row-by-row operators: every implementation against the float64 reference, and its limits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace_kernels import api, cpu_backend, reference, torch_backend
from millrace_kernels.cpu_backend import rows as cpu_rows

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
SETTINGS = settings(max_examples=15)


NAMES = ["torch", *cpu_backend.instruction_sets()]


@contextmanager
def kernels_by(name: str) -> Iterator[ModuleType]:
    """Yields a module that implements the operators: torch's, or C++ under an instruction set."""
    if name == "torch":
        yield torch_backend
        return
    with cpu_backend.instruction_set(name):
        yield cpu_rows


@pytest.fixture(params=NAMES)
def kernels(request) -> Iterator[ModuleType]:
    with kernels_by(request.param) as module:
        yield module


@pytest.fixture
def native() -> None:
    if not cpu_backend.AVAILABLE:
        pytest.skip("the C++ module isn't built here")


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@SETTINGS
@given(rows=st.integers(1, 9), width=st.integers(1, 300), seed=st.integers(0, 999))
def test_rms_norm(dtype, rows, width, seed):
    x, weight = randn(rows, width, dtype=dtype, seed=seed), randn(width, dtype=dtype, seed=seed + 1)
    expected = reference.rms_norm(x, weight, 1e-5)
    for name in NAMES:
        with kernels_by(name) as kernels:
            close(kernels.rms_norm(x, weight, 1e-5), expected)


@DTYPES
@SETTINGS
@given(rows=st.integers(1, 9), width=st.integers(1, 300), seed=st.integers(0, 999))
def test_add_rms_norm_is_the_norm_of_the_sum(variant, dtype, rows, width, seed):
    x, residual = randn(2, rows, width, dtype=dtype, seed=seed)
    weight = randn(width, dtype=dtype, seed=seed + 1)
    normed, total = api.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, residual + x)
    close(normed, reference.rms_norm(total, weight, 1e-6))
    assert torch.equal(normed, api.rms_norm(total, weight, 1e-6))


@DTYPES
def test_norm_of_heads_inside_a_fused_projection(kernels, dtype):
    fused = randn(6, 10, 32, dtype=dtype)
    weight = randn(32, dtype=dtype)
    out = kernels.rms_norm(fused[:, 2:7], weight, 1e-6)
    close(out, reference.rms_norm(fused[:, 2:7], weight, 1e-6))
    out = kernels.rms_norm(fused[:, 3], weight, 1e-6)
    close(out, reference.rms_norm(fused[:, 3], weight, 1e-6))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@DTYPES
def test_what_is_not_finite_stays_in_its_row(kernels, dtype, bad):
    x, weight = randn(3, 40, dtype=dtype), torch.ones(40, dtype=dtype)
    x[1, 7] = bad
    out = kernels.rms_norm(x, weight, 1e-6)
    assert out[[0, 2]].isfinite().all() and out[1, 7].isnan()


@DTYPES
@SETTINGS
@given(rows=st.integers(1, 9), width=st.integers(1, 300), seed=st.integers(0, 999))
def test_silu_mul(dtype, rows, width, seed):
    gate_up = randn(rows, 2 * width, dtype=dtype, seed=seed) * 4
    expected = reference.silu_mul(gate_up)
    for name in NAMES:
        with kernels_by(name) as kernels:
            close(kernels.silu_mul(gate_up), expected)


def test_silu_of_extreme_values(kernels):
    gate_up = torch.tensor([[-1e30, -200.0, -90.0, 90.0, 200.0, 1e30, *([2.0] * 6)]])
    out = kernels.silu_mul(gate_up)
    torch.testing.assert_close(out, reference.silu_mul(gate_up), rtol=1e-5, atol=1e-6)


def rope_write_kv_expected(qkv, cos, sin, pool, slots, q_heads, q_norm, k_norm):
    """Returns q and the pages, each step rounded to the dtype."""
    kv_heads = pool.shape[2]
    q_nhd, k_nhd, v_nhd = qkv.split((q_heads, kv_heads, kv_heads), 1)
    if q_norm is not None:
        q_nhd = q_norm * reference.rms_norm(q_nhd, torch.ones_like(q_norm), 1e-6)
    if k_norm is not None:
        k_nhd = k_norm * reference.rms_norm(k_nhd, torch.ones_like(k_norm), 1e-6)
    pool = pool.clone()
    reference.write_kv(pool, reference.rope(k_nhd, cos, sin), v_nhd, slots)
    return reference.rope(q_nhd, cos, sin), pool


@DTYPES
@SETTINGS
@given(
    rows=st.integers(0, 60),
    page_tokens=st.integers(1, 16),
    q_heads=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    half=st.sampled_from([1, 4, 20, 32, 37, 64]),
    normed=st.booleans(),
    seed=st.integers(0, 999),
)
def test_rope_write_kv(dtype, rows, page_tokens, q_heads, kv_heads, half, normed, seed):
    pages = -(-rows // page_tokens) + 2
    empty = randn(pages, 2, kv_heads, page_tokens, 2 * half, dtype=dtype, seed=seed)
    fused = randn(rows, q_heads + 2 * kv_heads, 2 * half, dtype=dtype, seed=seed + 1)
    angles = randn(rows, half, dtype=torch.float32, seed=seed + 2) * 50
    tables = angles.cos(), angles.sin()
    norms = randn(2, 2 * half, dtype=dtype, seed=seed + 3) / 4 if normed else (None, None)
    order = torch.randperm(pages * page_tokens, generator=torch.Generator().manual_seed(seed))
    slots = order[:rows].clone()
    expected_q, expected_pool = rope_write_kv_expected(
        fused, *tables, empty, slots, q_heads, *norms
    )
    untouched = torch.ones(pages * page_tokens, dtype=torch.bool)
    untouched[slots] = False
    kept = untouched.view(pages, page_tokens)
    for name in NAMES:
        qkv, pool = fused.clone(), empty.clone()
        with kernels_by(name) as kernels:
            q_nhd = kernels.rope_write_kv(
                qkv,
                *tables,
                pool,
                slots,
                num_q_heads=q_heads,
                q_norm=norms[0],
                k_norm=norms[1],
                eps=1e-6,
            )
        assert q_nhd.data_ptr() == qkv.data_ptr()
        close(q_nhd, expected_q)
        close(pool, expected_pool)
        assert torch.equal(pool[:, 1], expected_pool[:, 1]), name
        rows_of = (p.permute(0, 3, 1, 2, 4)[kept] for p in (pool, expected_pool))
        assert torch.equal(*rows_of), name


@DTYPES
def test_norms_inside_rope_write_kv_round_as_the_norm_by_itself(variant, dtype):
    rows, q_heads, kv_heads, dim = 5, 4, 2, 48
    qkv = randn(rows, q_heads + 2 * kv_heads, dim, dtype=dtype)
    angles = randn(rows, dim // 2, dtype=torch.float32, seed=1) * 50
    q_norm, k_norm = randn(2, dim, dtype=dtype, seed=2)
    split = qkv.clone()
    split[:, :q_heads] = api.rms_norm(split[:, :q_heads], q_norm, 1e-6)
    k_nhd = split[:, q_heads : q_heads + kv_heads]
    split[:, q_heads : q_heads + kv_heads] = api.rms_norm(k_nhd, k_norm, 1e-6)
    pools = torch.zeros(2, 2, 2, kv_heads, 4, dim, dtype=dtype)
    tables = (angles.cos(), angles.sin())
    slots = torch.arange(1, rows + 1)
    whole_q = api.rope_write_kv(
        qkv,
        *tables,
        pools[0],
        slots,
        num_q_heads=q_heads,
        q_norm=q_norm,
        k_norm=k_norm,
        eps=1e-6,
    )
    split_q = api.rope_write_kv(split, *tables, pools[1], slots, num_q_heads=q_heads)
    assert torch.equal(whole_q, split_q) and torch.equal(*pools)


@DTYPES
def test_large_inputs_go_over_the_pool(native, dtype, threads):
    torch.set_num_threads(4)
    x = randn(700, 512, dtype=dtype)
    weight = randn(512, dtype=dtype, seed=1)
    close(api.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    close(api.silu_mul(x), reference.silu_mul(x))
    qkv, angles = x.view(700, 8, 64).clone(), randn(700, 32, dtype=torch.float32, seed=2)
    pool, slots = torch.zeros(44, 2, 2, 16, 64, dtype=dtype), torch.arange(700)
    arguments = (angles.cos(), angles.sin(), pool, slots)
    expected_q, expected_pool = rope_write_kv_expected(qkv, *arguments, 4, None, None)
    close(api.rope_write_kv(qkv, *arguments, num_q_heads=4), expected_q)
    close(pool, expected_pool)


class TestBadInput:
    """Shapes that C++ must not get."""

    def test_wrong_widths(self, native):
        x = torch.zeros(2, 8)
        with pytest.raises(ValueError, match="rms_norm needs"):
            api.rms_norm(x, torch.zeros(9), 1e-6)
        with pytest.raises(ValueError, match="add_rms_norm needs"):
            api.add_rms_norm(x, torch.zeros(3, 8), torch.zeros(8), 1e-6)
        with pytest.raises(ValueError, match="silu_mul needs"):
            api.silu_mul(torch.zeros(2, 7))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"qkv": torch.zeros(3, 5, 8)}, "contiguous qkv"),
            ({"qkv": torch.zeros(3, 8, 6).transpose(1, 2)}, "contiguous qkv"),
            ({"qkv": torch.zeros(3, 6, 10)}, "pages that fit"),
            ({"cos": torch.zeros(2, 4)}, "angles"),
            ({"sin": torch.zeros(3, 4, dtype=torch.float64)}, "angles"),
            ({"slots": torch.tensor([0, 1, 2], dtype=torch.int32)}, "int64 slots"),
            ({"slots": torch.tensor([0, 1])}, "int64 slots"),
            ({"k_norm": torch.zeros(4)}, "norm weights"),
        ],
    )
    def test_rope_write_kv(self, native, change, message):
        arguments = {
            "qkv": torch.ones(3, 6, 8),
            "cos": torch.zeros(3, 4),
            "sin": torch.zeros(3, 4),
            "kv_layer": torch.zeros(4, 2, 2, 4, 8),
            "slots": torch.tensor([0, 1, 2]),
        }
        with pytest.raises(ValueError, match=message):
            api.rope_write_kv(**(arguments | change), num_q_heads=2)

    @pytest.mark.parametrize("slot", [-1, 16])
    def test_a_slot_outside_the_pool_is_named_and_nothing_written(self, native, slot):
        qkv, angles, pool = torch.ones(3, 6, 8), torch.ones(3, 4), torch.zeros(4, 2, 2, 4, 8)
        with pytest.raises(IndexError, match=f"slot {slot} "):
            api.rope_write_kv(qkv, angles, angles, pool, torch.tensor([0, 1, slot]), num_q_heads=2)
        assert not pool.any() and (qkv == 1).all()

    def test_unknown_instruction_set(self, native):
        with (
            pytest.raises(ValueError, match="no instruction set mmx"),
            cpu_backend.instruction_set("mmx"),
        ):
            pass


def test_backends_describe_themselves():
    text = api.describe_backends()
    assert torch.__version__ in text
    assert all(name in text for name in cpu_backend.instruction_sets()[:1])
