"""The small operators: every implementation against the float64 reference, and their limits."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millrace_kernels import api, cpu_backend, reference, torch_backend

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
SETTINGS = settings(
    max_examples=15,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


@pytest.fixture(params=["torch", *cpu_backend.instruction_sets()])
def kernels(request) -> Iterator[object]:
    """The module that implements the operators; C++ once for each instruction set."""
    if request.param == "torch":
        yield torch_backend
        return
    with cpu_backend.instruction_set(request.param):
        yield cpu_backend


@pytest.fixture(params=cpu_backend.instruction_sets())
def variant(request) -> Iterator[str]:
    """Each instruction set of the C++ kernels in turn."""
    with cpu_backend.instruction_set(request.param):
        yield request.param


@pytest.fixture
def native() -> None:
    if not cpu_backend.AVAILABLE:
        pytest.skip("the C++ module isn't built here")


@pytest.fixture
def threads() -> Iterator[None]:
    """Let a test set torch's thread count."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[actual.dtype]
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def randn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@DTYPES
@SETTINGS
@given(rows=st.integers(1, 9), width=st.integers(1, 300), seed=st.integers(0, 999))
def test_norms(kernels, dtype, rows, width, seed):
    x, residual = randn(2, rows, width, dtype=dtype, seed=seed)
    weight = randn(width, dtype=dtype, seed=seed + 1)
    plain = kernels.rms_norm(x, weight, 1e-5)
    if kernels is cpu_backend:
        plain, same = plain
        assert same is x
        normed, total = cpu_backend.rms_norm(x, weight, 1e-5, residual)
        assert torch.equal(total, residual + x)
        close(normed, reference.rms_norm(residual + x, weight, 1e-5))
    close(plain, reference.rms_norm(x, weight, 1e-5))


@DTYPES
def test_add_rms_norm_is_the_norm_of_the_sum(dtype):
    x, residual = randn(2, 5, 96, dtype=dtype)
    weight = randn(96, dtype=dtype)
    normed, total = api.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, residual + x)
    close(normed, reference.rms_norm(total, weight, 1e-6))


@DTYPES
def test_norm_of_heads_inside_a_fused_projection(kernels, dtype):
    fused = randn(6, 10, 32, dtype=dtype)
    weight = randn(32, dtype=dtype)
    out = kernels.rms_norm(fused[:, 2:7], weight, 1e-6)
    close(
        out[0] if kernels is cpu_backend else out, reference.rms_norm(fused[:, 2:7], weight, 1e-6)
    )


@DTYPES
@SETTINGS
@given(rows=st.integers(1, 9), width=st.integers(1, 300), seed=st.integers(0, 999))
def test_silu_mul(kernels, dtype, rows, width, seed):
    gate_up = randn(rows, 2 * width, dtype=dtype, seed=seed) * 4
    close(kernels.silu_mul(gate_up), reference.silu_mul(gate_up))


def test_silu_of_extreme_values(kernels):
    gate_up = torch.tensor([[-1e30, -200.0, -90.0, 90.0, 200.0, 1e30, *([2.0] * 6)]])
    out = kernels.silu_mul(gate_up)
    torch.testing.assert_close(out, reference.silu_mul(gate_up), rtol=1e-5, atol=1e-6)


@DTYPES
@SETTINGS
@given(
    rows=st.integers(1, 9),
    heads=st.integers(1, 5),
    half=st.integers(1, 80),
    seed=st.integers(0, 999),
)
def test_rope_inside_a_fused_projection(kernels, dtype, rows, heads, half, seed):
    fused = randn(rows, heads + 3, 2 * half, dtype=dtype, seed=seed)
    angles = randn(rows, half, dtype=torch.float32, seed=seed + 1) * 50
    before = fused.clone()
    kernels.rope_(fused[:, 1 : 1 + heads], angles.cos(), angles.sin())
    close(
        fused[:, 1 : 1 + heads],
        reference.rope(before[:, 1 : 1 + heads], angles.cos(), angles.sin()),
    )
    assert torch.equal(fused[:, 0], before[:, 0])
    assert torch.equal(fused[:, 1 + heads :], before[:, 1 + heads :])


@DTYPES
@SETTINGS
@given(
    rows=st.integers(0, 60),
    page_tokens=st.integers(1, 16),
    heads=st.integers(1, 4),
    head_dim=st.sampled_from([8, 40, 64]),
    seed=st.integers(0, 999),
)
def test_write_kv(kernels, dtype, rows, page_tokens, heads, head_dim, seed):
    pages = -(-rows // page_tokens) + 2
    pool = randn(pages, 2, heads, page_tokens, head_dim, dtype=dtype, seed=seed)
    fused = randn(rows, 2 * heads, head_dim, dtype=dtype, seed=seed + 1)
    order = torch.randperm(pages * page_tokens, generator=torch.Generator().manual_seed(seed))
    expected = pool.clone()
    arguments = (fused[:, :heads], fused[:, heads:], order[:rows])
    reference.write_kv(expected, *arguments)
    kernels.write_kv(pool, *arguments)
    assert torch.equal(pool, expected)


@DTYPES
def test_linear_of_many_rows_and_more_dimensions(dtype):
    x, weight = randn(3, 20, 48, dtype=dtype), randn(10, 48, dtype=dtype, seed=1) / 7
    close(api.linear(x, weight), reference.linear(x, weight))
    close(api.linear(x[0, 0], weight), reference.linear(x[0, 0], weight))
    close(api.linear(x[:, :2, :], weight), reference.linear(x[:, :2, :], weight))
    assert api.linear(x[:0], weight).shape == (0, 20, 10)


@DTYPES
def test_large_inputs_go_over_the_pool(native, dtype, threads):
    torch.set_num_threads(4)
    x = randn(700, 512, dtype=dtype)
    weight = randn(512, dtype=dtype, seed=1)
    close(api.rms_norm(x, weight, 1e-6), reference.rms_norm(x, weight, 1e-6))
    close(api.silu_mul(x), reference.silu_mul(x))
    q_nhd = x.view(700, 8, 64).clone()
    angles = randn(700, 32, dtype=torch.float32, seed=2)
    q_out, k_out = api.apply_rope(q_nhd[:, :6], q_nhd[:, 6:], angles.cos(), angles.sin())
    expected = reference.rope(x.view(700, 8, 64), angles.cos(), angles.sin())
    close(torch.cat([q_out, k_out], 1), expected)


class TestBadInput:
    """Shapes that C++ must not be handed."""

    def test_wrong_widths(self, native):
        x = torch.zeros(2, 8)
        with pytest.raises(ValueError, match="x must be"):
            api.linear(x, torch.zeros(4, 9))
        with pytest.raises(ValueError, match="bias is"):
            api.linear(x, torch.zeros(4, 8), torch.zeros(5))
        with pytest.raises(ValueError, match="rms_norm needs"):
            api.rms_norm(x, torch.zeros(9), 1e-6)
        with pytest.raises(ValueError, match="add_rms_norm needs"):
            api.add_rms_norm(x, torch.zeros(3, 8), torch.zeros(8), 1e-6)
        with pytest.raises(ValueError, match="silu_mul needs"):
            api.silu_mul(torch.zeros(2, 7))

    def test_rope_and_write_kv(self, native):
        q_nhd, angles = torch.zeros(3, 2, 8), torch.zeros(3, 4)
        with pytest.raises(ValueError, match="angles"):
            api.apply_rope(q_nhd, q_nhd, angles[:2], angles)
        with pytest.raises(ValueError, match="side by side"):
            api.apply_rope(q_nhd.transpose(0, 1), q_nhd, angles, angles)
        pool, slots = torch.zeros(4, 2, 2, 4, 8), torch.tensor([0, 1, 2])
        with pytest.raises(ValueError, match="write_kv needs k and v"):
            api.write_kv(pool, q_nhd[:, :1], q_nhd, slots)
        with pytest.raises(ValueError, match="int64"):
            api.write_kv(pool, q_nhd, q_nhd, slots.int())
        for slot in (-1, 16):
            with pytest.raises(IndexError, match=f"slot {slot} "):
                api.write_kv(pool, q_nhd, q_nhd, torch.tensor([0, 1, slot]))
        assert not pool.any()

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
