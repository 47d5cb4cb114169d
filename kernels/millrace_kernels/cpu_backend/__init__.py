"""Calls the C++ kernels of `_cpu`: checks tensors, then passes their addresses.

Addresses, not DLPack: a decode step makes over a hundred of these calls, and taking an address
costs a tenth of an exchange. So every check that keeps C++ inside its memory is made here. Shape
letters: n tokens, h q heads, k kv heads, d head_dim.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from millrace_kernels.plan import AttentionPlan
from millrace_kernels.recording import launch

try:
    from millrace_kernels import _cpu
except ImportError as error:  # not built on this machine: torch computes everything
    AVAILABLE = False
    TYPES = {}
    warnings.warn(
        f"the CPU kernels in C++ are missing ({error}): on the CPU, torch alone computes models, "
        "several times slower. Install a C++ compiler, then install Millrace again",
        RuntimeWarning,
        stacklevel=2,
    )
else:
    AVAILABLE = True
    TYPES = {torch.float32: _cpu.Type.F32, torch.bfloat16: _cpu.Type.BF16}


def takes(x: Tensor) -> bool:
    """Returns whether the kernels can work on tensors like x."""
    return x.is_cpu and x.dtype in TYPES


def takes_dtype(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether the kernels can work on this device and dtype."""
    return device.type == "cpu" and dtype in TYPES


def instruction_sets() -> list[str]:
    """Returns the variants that this machine can run, fastest first; empty when `_cpu` isn't
    built.
    """
    return _cpu.instruction_sets() if AVAILABLE else []


@contextmanager
def instruction_set(name: str) -> Iterator[None]:
    """Uses one variant in this block, in the whole process; raises ValueError when it can't run
    here.
    """
    before = _cpu.instruction_set()
    _cpu.use_instruction_set(name)
    try:
        yield
    finally:
        _cpu.use_instruction_set(before)


def variant() -> str:
    """Returns the instruction set in use."""
    return _cpu.instruction_set()


def uses_vectors() -> bool:
    """Returns whether the kernels are built, and the set in use is written for the processor's own
    vectors.
    """
    return AVAILABLE and variant() != "portable"


def describe() -> str:
    """Returns the variant in use, for `describe_backends`."""
    return f"C++ {variant()}" if AVAILABLE else "C++ not built"


class CpuPlan:
    """The tasks of all sequences."""

    def __init__(self, checked: AttentionPlan) -> None:
        """Raises IndexError when the page table has a negative page among the entries that are
        read.

        If the step is recorded, each replay plans again from the tables' present content.
        """
        table = checked.page_table.cpu().contiguous()
        q_at, kv_at = checked.q_positions, checked.kv_positions
        self._read_in_place = (table, q_at, kv_at)  # C++ has only their addresses
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
        )
        launch(self._plan.prepare)

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
        launch(
            self._plan.run,
            TYPES[q_nhd.dtype],
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
    """Makes the C++ side of a plan."""
    return CpuPlan(checked)


def merge_attention_(
    out_nhd: Tensor, lse_nh: Tensor, other_out_nhd: Tensor, other_lse_nh: Tensor
) -> None:
    """Merges another partial result into contiguous out_nhd and lse_nh, in float32 inside."""
    other_out_nhd, other_lse_nh = other_out_nhd.contiguous(), other_lse_nh.contiguous()
    _need_contiguous(out_nhd, lse_nh)
    _cpu.merge_attention(
        TYPES[out_nhd.dtype],
        out_nhd.data_ptr(),
        lse_nh.data_ptr(),
        TYPES[other_out_nhd.dtype],
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


def need(condition: bool, what: str, *tensors: Tensor) -> None:
    """Raises ValueError with the tensors' dtypes and shapes unless the condition holds."""
    if not condition:
        shapes = ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors)
        raise ValueError(f"{what}: got {shapes}")
