"""Linears and experts in C++: against float64, each row alone, fused against one by one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from millrace_kernels import api, cpu_backend, reference
from millrace_kernels.cpu_backend import linear as cpu_linear
from millrace_kernels.cpu_backend import rows as cpu_rows
from millrace_kernels.cpu_backend.linear import CpuExperts, CpuLinear
from support.cpu_kernels import KERNELS, using

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
NATIVE = pytest.mark.skipif(not cpu_backend.AVAILABLE, reason="the C++ module isn't built here")
SETTINGS = settings(max_examples=25)
DETERMINISTIC = [name for name in KERNELS if name.startswith("deterministic")]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype)


def weights(*shape: int, dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """Random weights of a size such that products are about as large as x."""
    return (randn(*shape, seed=seed) / shape[-1] ** 0.5).to(dtype)


@NATIVE
@DTYPES
@SETTINGS
@given(
    rows=st.integers(1, 40),
    inputs=st.integers(1, 700),
    outputs=st.integers(1, 150),
    has_bias=st.booleans(),
    gap=st.integers(0, 3),
    seed=st.integers(0, 999),
)
def test_products_match_float64(dtype, rows, inputs, outputs, has_bias, gap, seed):
    x = randn(rows, inputs + gap, dtype=dtype, seed=seed)[:, gap:]
    weight = weights(outputs, inputs, dtype=dtype, seed=seed + 1)
    bias = randn(outputs, dtype=dtype, seed=seed + 2) if has_bias else None
    expected = reference.linear(x, weight, bias)
    for name in KERNELS:
        with using(name):
            close(CpuLinear(weight, bias)(x), expected)


@NATIVE
@DTYPES
def test_more_rows_than_a_task_and_a_chunk_hold(dtype):
    x, weight = randn(450, 16000, dtype=dtype), weights(70, 16000, dtype=dtype)
    expected = reference.linear(x, weight, None)
    for name in KERNELS:
        with using(name):
            linear = CpuLinear(weight, None)
            whole = linear(x)
            close(whole, expected)
            # a chunk of 192 would leave a few over
            assert torch.equal(linear(x[:195]), whole[:195]), name


@NATIVE
@DTYPES
def test_a_task_never_has_a_few_rows_left_over(dtype):
    x, weight = randn(2500, 32, dtype=dtype), weights(70, 32, dtype=dtype)
    for name in KERNELS:
        with using(name):
            linear = CpuLinear(weight, None)
            whole = linear(x)
            for rows in (193, 195, 400, 2113, 2305):  # tasks of 192 or 176 rows would leave 1 to 8
                assert torch.equal(linear(x[:rows]), whole[:rows]), name


@DTYPES
@pytest.mark.parametrize("inputs", [512, 301])
def test_fast_rows_have_the_same_bits_among_few_or_many_on_any_threads(
    variant, dtype, inputs, threads
):
    x, weight = randn(200, inputs, dtype=dtype), weights(331, inputs, dtype=dtype)
    linear = CpuLinear(weight, None)
    torch.set_num_threads(1)
    few, many = linear(x[:8]), linear(x)
    for count in (1, 5):
        torch.set_num_threads(count)
        for rows in range(1, 8):
            assert torch.equal(linear(x[:rows]), few[:rows])
            assert torch.equal(linear(x[8 - rows : 8]), few[8 - rows :])
        for rows in (*range(9, 20), 47, 193, 200):
            assert torch.equal(linear(x[:rows]), many[:rows])
            assert torch.equal(linear(x[-rows:]), many[-rows:])


@DTYPES
@pytest.mark.parametrize("inputs", [512, 301, 2100])
def test_a_row_has_the_same_bits_among_any_rows_on_any_threads(
    variant, deterministic, dtype, inputs, threads
):
    x, weight = randn(200, inputs, dtype=dtype), weights(331, inputs, dtype=dtype)
    linear = CpuLinear(weight, randn(331, dtype=dtype, seed=2))
    torch.set_num_threads(1)
    all_rows = linear(x)
    for count in (1, 5):
        torch.set_num_threads(count)
        for rows in (*range(1, 20), 47, 193, 200):
            assert torch.equal(linear(x[:rows]), all_rows[:rows])
            if rows < 20:
                assert torch.equal(linear(x[-rows:]), all_rows[-rows:])


@NATIVE
@DTYPES
@SETTINGS
@given(data=st.data(), inputs=st.integers(1, 2300), outputs=st.integers(1, 100))
def test_a_row_never_notices_the_others(dtype, data, inputs, outputs):
    x, weight = randn(60, inputs, dtype=dtype), weights(outputs, inputs, dtype=dtype)
    company = data.draw(st.lists(st.integers(0, 59), min_size=1, max_size=60, unique=True))
    for name in DETERMINISTIC:
        with using(name):
            linear = CpuLinear(weight, None)
            alone = linear(x[company[:1]])
            assert torch.equal(linear(x[company])[:1], alone), name
            assert torch.equal(linear(x[company[::-1]])[-1:], alone), name


@DTYPES
@pytest.mark.parametrize("inputs", [256, 99])
def test_a_norm_before_it_changes_no_bit(variant, dtype, inputs):
    wide, others = randn(70, inputs + 5, dtype=dtype)[:, 5:], randn(70, inputs, dtype=dtype, seed=3)
    scale, weight = randn(inputs, dtype=dtype, seed=4), weights(40, inputs, dtype=dtype)
    linear = CpuLinear(weight, randn(40, dtype=dtype, seed=5))
    for rows in (1, 3, 8, 9, 70):
        for residual in (None, others[:rows]):
            out, total = linear.after_norm(wide[:rows], residual, scale, 1e-6)
            normed, expected = cpu_rows.norm(wide[:rows], residual, scale, 1e-6)
            assert torch.equal(out, linear(normed)), rows
            assert torch.equal(total, expected), rows


@DTYPES
@pytest.mark.parametrize("inputs", [256, 99])
def test_an_activation_before_it_changes_no_bit(variant, dtype, inputs):
    gate_up = randn(300, 2 * inputs, dtype=dtype)
    linear = CpuLinear(weights(40, inputs, dtype=dtype), None)
    for rows in (1, 3, 8, 9, 300):
        x = gate_up[:rows]
        assert torch.equal(linear.after_silu(x), linear(cpu_rows.silu_mul(x))), rows


@NATIVE
@DTYPES
@settings(SETTINGS, max_examples=12)
@given(
    tokens=st.integers(1, 50),
    per_token=st.integers(1, 4),
    hidden=st.integers(1, 90),
    width=st.integers(1, 90),
    seed=st.integers(0, 999),
)
@example(tokens=40, per_token=2, hidden=64, width=48, seed=0)  # one of both has whole steps
@example(tokens=40, per_token=2, hidden=48, width=64, seed=0)
def test_experts_match_one_token_after_another(dtype, tokens, per_token, hidden, width, seed):
    gate_up = weights(6, 2 * width, hidden, dtype=dtype, seed=seed)
    down = weights(6, hidden, width, dtype=dtype, seed=seed + 1)
    x = randn(tokens, hidden, dtype=dtype, seed=seed + 2)
    ids = torch.rand(tokens, 6, generator=torch.Generator().manual_seed(seed)).topk(per_token)[1]
    shares = randn(tokens, per_token, seed=seed + 3).softmax(-1)
    expected = torch.zeros(tokens, hidden, dtype=torch.float64)
    for token in range(tokens):
        for expert, share in zip(ids[token].tolist(), shares[token].tolist(), strict=True):
            inner = reference.silu_mul(reference.linear(x[token][None], gate_up[expert], None))
            product = reference.linear(inner, down[expert], None)[0]
            expected[token] += share * product.double()
    for name in DETERMINISTIC:
        with using(name):
            experts = CpuExperts(gate_up, down)
            actual = experts(x, ids, shares)
            close(actual, expected.to(dtype))
            for token in {0, tokens // 2, tokens - 1}:
                alone = slice(token, token + 1)
                by_itself = experts(x[alone], ids[alone], shares[alone])
                assert torch.equal(by_itself, actual[alone]), name


def test_more_tokens_than_the_experts_sort_at_once(variant, deterministic):
    gate_up = weights(3, 16, 8, dtype=torch.float32)
    down = weights(3, 8, 8, dtype=torch.float32, seed=2)
    x, shares = randn(3000, 8), torch.full((3000, 2), 0.5)
    ids = torch.stack((torch.arange(3000) % 3, torch.arange(1, 3001) % 3), dim=1)
    experts = CpuExperts(gate_up, down)
    whole = experts(x, ids, shares)
    assert torch.equal(whole[2500:], experts(x[2500:], ids[2500:], shares[2500:]))


@NATIVE
def test_what_does_not_fit_is_refused():
    linear = CpuLinear(torch.zeros(4, 8), None)
    for x in (torch.zeros(8), torch.zeros(2, 7), torch.zeros(2, 8, dtype=torch.float64)):
        with pytest.raises(ValueError, match="x must be"):
            linear(x)
    with pytest.raises(ValueError, match="residual"):
        linear.after_norm(torch.zeros(2, 8), torch.zeros(1, 8), torch.zeros(8), 1e-6)
    with pytest.raises(ValueError, match="norm_weight"):
        linear.after_norm(torch.zeros(2, 8), None, torch.zeros(7), 1e-6)
    with pytest.raises(ValueError, match="x must be"):
        linear.after_silu(torch.zeros(2, 8))
    with pytest.raises(ValueError, match="bias"):
        CpuLinear(torch.zeros(4, 8), torch.zeros(5))
    with pytest.raises(ValueError, match="contiguous"):
        CpuLinear(torch.zeros(8, 4).T, None)
    experts = CpuExperts(torch.zeros(2, 6, 4), torch.zeros(2, 4, 3))
    x, ids, shares = torch.zeros(1, 4), torch.zeros(1, 1, dtype=torch.int64), torch.ones(1, 1)
    for wrong in (-1, 2):
        with pytest.raises(IndexError, match="expert"):
            experts(x, ids + wrong, shares)
    with pytest.raises(ValueError, match="expert_ids"):
        experts(x, ids, torch.ones(1, 2))


@NATIVE
@pytest.mark.parametrize(
    ("native", "dtype", "takes_all"),
    [
        ("avx2", torch.float32, True),
        ("avx2", torch.bfloat16, True),
        ("avx512", torch.float32, False),
        ("avx512_bf16", torch.bfloat16, True),
        ("amx", torch.float32, False),
        ("amx", torch.bfloat16, True),
        ("portable", torch.float32, False),
        ("portable", torch.bfloat16, False),
    ],
)
def test_the_choice_of_rows_follows_what_the_processor_can_do(
    monkeypatch, native, dtype, takes_all
):
    monkeypatch.setattr(cpu_backend, "variant", lambda: native)
    assert (cpu_linear.most_rows(dtype) == cpu_linear.ALL_ROWS) is takes_all
    assert (cpu_linear.most_assignments() == cpu_linear.ALL_ROWS) is (native != "portable")


@pytest.mark.parametrize("native", ["avx512", "portable"])
def test_deterministic_linears_take_all_rows(monkeypatch, deterministic, native):
    monkeypatch.setattr(cpu_backend, "variant", lambda: native)
    assert cpu_linear.most_rows(torch.float32) == cpu_linear.ALL_ROWS
    assert cpu_linear.most_assignments() == cpu_linear.ALL_ROWS


def test_a_linear_of_nothing_gives_nothing():
    assert api.prepare_linear(torch.zeros(3, 4))(torch.zeros(0, 4)).shape == (0, 3)
    assert torch.equal(
        api.prepare_linear(torch.zeros(3, 0), torch.ones(3))(torch.zeros(2, 0)), torch.ones(2, 3)
    )


def test_few_rows_are_as_many_as_in_cpp() -> None:
    header = Path(__file__).parents[2] / "kernels" / "cpu" / "linear.hpp"
    (in_cpp,) = re.findall(r"\bkFewRows = (\d+);", header.read_text(encoding="utf-8"))
    assert int(in_cpp) == cpu_linear.FEW_ROWS
