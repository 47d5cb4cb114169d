"""Linears with `out`: the same bits, on every backend's path."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from millrace_kernels import api, cpu_backend
from millrace_kernels.cpu_backend import linear as cpu_linear

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
ROWS = pytest.mark.parametrize("rows", [0, 1, 3, 8, 9, 500])
INPUTS, OUTPUTS = 96, 70


@pytest.fixture(params=[True, False], ids=["native", "torch"], autouse=True)
def native(request, monkeypatch) -> Iterator[bool]:
    """Runs with the CPU's kernels for any number of rows, and for the fewest."""
    most = cpu_linear.ALL_ROWS if request.param else 8
    monkeypatch.setattr(cpu_linear, "most_rows", lambda dtype: most)
    yield request.param


@pytest.fixture(params=[False, True], ids=["plain", "bias"])
def linear(request, dtype) -> api.Linear:
    return api.prepare_linear(
        randn(OUTPUTS, INPUTS, dtype=dtype),
        randn(OUTPUTS, dtype=dtype, seed=1) if request.param else None,
    )


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@ROWS
def test_out_gets_what_is_returned_without_it(linear, dtype, rows):
    x, gate_up = randn(rows, INPUTS, dtype=dtype), randn(rows, 2 * INPUTS, dtype=dtype)
    out = torch.empty(rows, OUTPUTS, dtype=dtype)
    assert linear(x, out) is out and torch.equal(out, linear(x))
    assert linear.after_silu(gate_up, out) is out
    assert torch.equal(out, linear.after_silu(gate_up))


@DTYPES
@ROWS
def test_the_total_may_take_the_residuals_place(linear, dtype, rows):
    x, residual = randn(rows, INPUTS, dtype=dtype), randn(rows, INPUTS, dtype=dtype, seed=1)
    norm = randn(INPUTS, dtype=dtype, seed=2)
    expected, summed = linear.after_norm(x, residual, norm, 1e-6)
    out, apart = torch.empty(rows, OUTPUTS, dtype=dtype), torch.empty(rows, INPUTS, dtype=dtype)
    for total in (apart, residual):  # the residual last: it is gone then
        result = linear.after_norm(x, residual, norm, 1e-6, out, total)
        assert result[0] is out and result[1] is total
        assert torch.equal(out, expected) and torch.equal(total, summed)
    alone, same = linear.after_norm(x, None, norm, 1e-6, out)
    assert alone is out and same is x
    assert torch.equal(out, linear.after_norm(x, None, norm, 1e-6)[0])


@pytest.mark.parametrize("dtype", [torch.float32])
@pytest.mark.parametrize("rows", [2, 9])
def test_an_out_that_does_not_fit_is_refused(linear, dtype, rows, native):
    x, residual, norm = torch.zeros(rows, INPUTS), torch.zeros(rows, INPUTS), torch.zeros(INPUTS)
    with pytest.raises(ValueError, match="out"):
        linear(x, torch.empty(rows, OUTPUTS + 1))
    with pytest.raises(ValueError, match="out"):
        linear.after_silu(torch.zeros(rows, 2 * INPUTS), torch.empty(rows + 1, OUTPUTS))
    if native and cpu_backend.AVAILABLE:
        for total in (torch.empty(rows, INPUTS + 1), torch.empty(INPUTS, rows).T):
            with pytest.raises(ValueError, match="total"):
                linear.after_norm(x, residual, norm, 1e-6, None, total)
        with pytest.raises(ValueError, match="out"):
            linear(x, torch.empty(rows, OUTPUTS, dtype=torch.float16))
