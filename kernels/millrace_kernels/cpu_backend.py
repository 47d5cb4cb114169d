"""The C++ kernels of `_cpu`: checks tensors, then hands their addresses over.

Addresses, not DLPack: a decode step makes over a hundred of these calls, and taking an address
costs a tenth of an exchange. So every check that keeps C++ inside its memory is made here.
Shape letters: n tokens, h q heads, k kv heads, d head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch import Tensor

from millrace_kernels.plan import AttentionPlan

try:
    from millrace_kernels import _cpu
except ImportError:  # not built on this machine: torch does it all
    AVAILABLE = False
    _TYPES = {}
else:
    AVAILABLE = True
    _TYPES = {torch.float32: _cpu.Type.F32, torch.bfloat16: _cpu.Type.BF16}

ALL_ROWS: Final = 2**31 - 1

_AMX_ROWS: Final = 8
"""Query rows up to which a sequence is bound by reading K/V rather than by multiplying."""


def takes(x: Tensor) -> bool:
    """Whether the kernels can work on tensors like x."""
    return x.is_cpu and x.dtype in _TYPES


def takes_dtype(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels can work on this device and dtype."""
    return device.type == "cpu" and dtype in _TYPES


def instruction_sets() -> list[str]:
    """The variants that this machine can run, fastest first; empty when `_cpu` isn't built."""
    return _cpu.instruction_sets() if AVAILABLE else []


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Use one variant in this block, in the whole process; ValueError when it can't run here."""
    before = _cpu.instruction_set()
    _cpu.use_instruction_set(name)
    try:
        yield
    finally:
        _cpu.use_instruction_set(before)


def describe() -> str:
    """The variant in use, for `describe_backends`."""
    return f"C++ {_cpu.instruction_set()}" if AVAILABLE else "C++ not built"


def attention_rows(plan: AttentionPlan) -> int:
    """The most query rows of a sequence that the C++ kernels take of a plan in AUTO; torch's rest.

    All of them, but for plain causal bfloat16 where the CPU has AMX: there torch's matrix products
    (oneDNN) are several times as fast as any vector instruction, and prefill chunks are torch's.
    """
    if plan.dtype is not torch.bfloat16 or not _cpu.has_amx():
        return ALL_ROWS
    plain = plan.causal and not (plan.has_positions or plan.soft_cap or plan.sliding_window)
    chunks = any(stop - start > _AMX_ROWS for start, stop, _ in plan.sequences)
    return _AMX_ROWS if plain and chunks else ALL_ROWS


class CpuPlan:
    """The tasks of the sequences that have at most `native_rows` query rows."""

    def __init__(self, checked: AttentionPlan) -> None:
        """Raises IndexError when the page table names a negative page where it is read."""
        table = checked.page_table.cpu().contiguous()
        q_at, kv_at = checked.q_positions, checked.kv_positions
        self._read_in_place = (table, q_at, kv_at)  # C++ has but their addresses
        self._plan = _cpu.AttentionPlan(
            checked.q_indptr.data_ptr(),
            checked.kv_lens.data_ptr(),
            table.data_ptr(),
            len(checked.sequences),
            table.shape[1],
            checked.page_tokens,
            checked.num_q_heads,
            checked.num_kv_heads,
            checked.head_dim,
            0 if q_at is None else q_at.data_ptr(),
            0 if kv_at is None else kv_at.data_ptr(),
            checked.causal,
            checked.sliding_window or 0,
            checked.soft_cap or 0.0,
            checked.native_rows,
        )

    def run(
        self, q_nhd: Tensor, kv_layer: Tensor, *, scale: float, out_nhd: Tensor, lse_nh: Tensor
    ) -> None:
        """Fills the planned rows of out_nhd and lse_nh.

        Raises ValueError for a layout that C++ can't walk, IndexError for a page outside the pool.
        """
        stride_n, stride_h, stride_d = q_nhd.stride()
        if stride_d != 1:
            q_nhd = q_nhd.contiguous()
            stride_n, stride_h, _ = q_nhd.stride()
        _need_contiguous(kv_layer, out_nhd, lse_nh)
        self._plan.run(
            _TYPES[q_nhd.dtype],
            q_nhd.data_ptr(),
            out_nhd.data_ptr(),
            out_nhd.dtype is torch.float32,
            lse_nh.data_ptr(),
            kv_layer.data_ptr(),
            stride_n,
            stride_h,
            kv_layer.shape[0],
            scale,
            torch.get_num_threads(),
        )


def plan(checked: AttentionPlan) -> CpuPlan:
    """The C++ side of a plan."""
    return CpuPlan(checked)


def merge_attention_(
    out_nhd: Tensor, lse_nh: Tensor, other_out_nhd: Tensor, other_lse_nh: Tensor
) -> None:
    """Take another partial result into contiguous out_nhd and lse_nh, in float32 inside."""
    other_out_nhd, other_lse_nh = other_out_nhd.contiguous(), other_lse_nh.contiguous()
    _need_contiguous(out_nhd, lse_nh)
    _cpu.merge_attention(
        _TYPES[out_nhd.dtype],
        out_nhd.data_ptr(),
        lse_nh.data_ptr(),
        _TYPES[other_out_nhd.dtype],
        other_out_nhd.data_ptr(),
        other_lse_nh.data_ptr(),
        lse_nh.numel(),
        out_nhd.shape[2],
        torch.get_num_threads(),
    )


def _need_contiguous(*tensors: Tensor | None) -> None:
    for tensor in tensors:
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"a tensor of shape {tuple(tensor.shape)} must be contiguous")


def _need(condition: bool, what: str, *tensors: Tensor) -> None:
    if not condition:
        shapes = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors)
        raise ValueError(f"{what}: got {shapes}")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [..., in] @ weight [out, in].T + bias, reading the weights once for all rows of x."""
    outputs, inputs = weight.shape
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, x.shape[-1]).contiguous()
    _need(
        rows.shape[1] == inputs and weight.dtype == x.dtype and weight.is_contiguous(),
        "linear needs x [..., in] and a contiguous weight [out, in] of one dtype",
        x,
        weight,
    )
    if bias is not None:
        _need(
            bias.shape == (outputs,) and bias.dtype == x.dtype and bias.is_contiguous(),
            "linear needs a bias [out] of x's dtype",
            bias,
        )
    out = torch.empty((*x.shape[:-1], outputs), dtype=x.dtype)
    _cpu.linear(
        _TYPES[x.dtype],
        rows.data_ptr(),
        rows.stride(0),
        rows.shape[0],
        inputs,
        weight.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        outputs,
        out.data_ptr(),
        torch.get_num_threads(),
    )
    return out


def rms_norm(
    x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (normed, total), where total is residual + x, or x itself without a residual."""
    width = x.shape[-1]
    rows = x if x.dim() == 2 and x.stride(1) == 1 else x.reshape(-1, width).contiguous()
    _need(
        weight.shape == (width,) and weight.dtype == x.dtype and weight.is_contiguous(),
        "rms_norm needs a contiguous weight of x's width and dtype",
        x,
        weight,
    )
    out = torch.empty(x.shape, dtype=x.dtype)
    total, other = x, 0
    if residual is not None:
        residual = residual.contiguous()
        _need(
            residual.shape == x.shape and residual.dtype == x.dtype,
            "add_rms_norm needs a residual of x's shape and dtype",
            x,
            residual,
        )
        total, other = torch.empty(x.shape, dtype=x.dtype), residual.data_ptr()
    _cpu.rms_norm(
        _TYPES[x.dtype],
        rows.data_ptr(),
        rows.stride(0),
        other,
        total.data_ptr() if other else 0,
        weight.data_ptr(),
        out.data_ptr(),
        rows.shape[0],
        width,
        eps,
        torch.get_num_threads(),
    )
    return out, total


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up for gate_up [..., 2 * i] with gate first; returns [..., i]."""
    _need(gate_up.shape[-1] % 2 == 0, "silu_mul needs an even width", gate_up)
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = torch.empty((*gate_up.shape[:-1], width), dtype=gate_up.dtype)
    _cpu.silu_mul(
        _TYPES[gate_up.dtype],
        gate_up.data_ptr(),
        out.data_ptr(),
        gate_up.numel() // max(2 * width, 1),
        width,
        torch.get_num_threads(),
    )
    return out


def rope_(x_nhd: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate x in place; cos and sin: contiguous float32 [n, d / 2]."""
    rows, heads, head_dim = x_nhd.shape
    _need(
        x_nhd.stride(2) == 1 and x_nhd.stride(1) == head_dim,
        "rope needs each token's heads side by side",
        x_nhd,
    )
    for angles in (cos, sin):
        _need(
            angles.shape == (rows, head_dim // 2)
            and angles.dtype == torch.float32
            and angles.is_contiguous(),
            "rope needs contiguous float32 angles [n, head_dim / 2]",
            x_nhd,
            angles,
        )
    _cpu.rope(
        _TYPES[x_nhd.dtype],
        x_nhd.data_ptr(),
        x_nhd.stride(0),
        heads,
        head_dim,
        cos.data_ptr(),
        sin.data_ptr(),
        rows,
        torch.get_num_threads(),
    )


def write_kv(kv_layer: Tensor, k_nhd: Tensor, v_nhd: Tensor, slots: Tensor) -> None:
    """Copy the rows of k and v into their pages. Raises IndexError for a slot outside the pool."""
    pages, _, kv_heads, page_tokens, head_dim = kv_layer.shape
    rows = (slots.shape[0], kv_heads, head_dim)
    for x in (k_nhd, v_nhd):
        _need(
            x.shape == rows
            and x.dtype == kv_layer.dtype
            and x.stride(2) == 1
            and x.stride(1) == head_dim,
            f"write_kv needs k and v of {kv_layer.dtype} {rows}, heads side by side",
            x,
        )
    _need(
        slots.dtype == torch.int64 and slots.is_contiguous() and kv_layer.is_contiguous(),
        "write_kv needs int64 slots and contiguous pages",
        slots,
        kv_layer,
    )
    size = kv_layer.element_size()
    _cpu.write_kv(
        kv_layer.data_ptr(),
        pages,
        kv_heads,
        page_tokens,
        head_dim * size,
        k_nhd.data_ptr(),
        k_nhd.stride(0) * size,
        v_nhd.data_ptr(),
        v_nhd.stride(0) * size,
        slots.data_ptr(),
        slots.shape[0],
        torch.get_num_threads(),
    )
