"""Linears and experts in C++: one call for a product and the norm or activation before it.

Shape letters: n rows of x, H in, O out; E experts, X width of one, t experts a token.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from millrace_kernels import cpu_backend

if cpu_backend.AVAILABLE:
    from millrace_kernels import _cpu

_SKINNY_ROWS: Final = 8
"""Rows of x up to which reading the weights is all that counts."""

_ALL_ROWS: Final = 2**31 - 1


def most_rows(dtype: torch.dtype) -> int:
    """Rows of x up to which C++ runs a linear rather than torch, by what the processor can do.

    Few rows always. Many rows in float32 with AVX2, where it beats MKL; in bfloat16 on every x86
    that has no matrix unit (AMX) for it. With AVX-512 torch's float32 product is as good, and on
    other processors torch brings the vendor's library.
    """
    native = _cpu.instruction_set()
    if dtype == torch.bfloat16:
        return _SKINNY_ROWS if native == "portable" or _cpu.has_amx() else _ALL_ROWS
    return _ALL_ROWS if native == "avx2" else _SKINNY_ROWS


def _shape(*tensors: Tensor) -> str:
    return ", ".join(f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in tensors)


class CpuLinear:
    """x @ weight.T + bias over a contiguous weight [O, H], whose address C++ keeps."""

    __slots__ = ("_norm", "_tensors", "dtype", "inputs", "native", "outputs")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        """Raises ValueError unless both are contiguous on the CPU and the bias fits."""
        if not weight.is_contiguous() or not cpu_backend.takes(weight):
            raise ValueError(f"weight must be contiguous on the CPU, got {_shape(weight)}")
        if bias is not None and (
            bias.shape != weight.shape[:1]
            or bias.dtype != weight.dtype
            or not bias.is_cpu
            or not bias.is_contiguous()
        ):
            raise ValueError(f"bias must be contiguous [O] of the weight's dtype: {_shape(bias)}")
        self._tensors = (weight, bias)
        self._norm: Tensor | None = None
        self.dtype = weight.dtype
        self.outputs, self.inputs = weight.shape
        self.native = _cpu.Linear(
            cpu_backend.TYPES[weight.dtype],
            weight.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            self.inputs,
            self.outputs,
        )

    def _rows(self, x: Tensor, width: int) -> Tensor:
        if x.dim() != 2 or x.shape[1] != width or x.dtype != self.dtype or not x.is_cpu:
            raise ValueError(f"x must be {self.dtype} [n, {width}] on the CPU, got {_shape(x)}")
        return x if x.stride(1) == 1 or width == 1 else x.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        """x [n, H], rows contiguous or not -> [n, O]. Raises ValueError for another shape."""
        x = self._rows(x, self.inputs)
        rows = x.shape[0]
        out = torch.empty((rows, self.outputs), dtype=self.dtype)
        self.native.run(x.data_ptr(), x.stride(0), rows, out.data_ptr(), torch.get_num_threads())
        return out

    def after_norm(
        self, x: Tensor, residual: Tensor | None, norm_weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        """(linear(rms_norm(total)), total): bitwise what norm and linear give one by one.

        x, residual [n, H]; norm_weight [H]. Raises ValueError for other shapes or dtypes.
        """
        x = self._rows(x, self.inputs)
        if norm_weight is not self._norm:
            self._check_norm(norm_weight)
        total, other = x, 0
        if residual is not None:
            if residual.shape != x.shape or residual.dtype != self.dtype:
                raise ValueError(f"residual must be like x: {_shape(residual, x)}")
            residual = residual.contiguous()
            total, other = torch.empty(x.shape, dtype=self.dtype), residual.data_ptr()
        rows = x.shape[0]
        out = torch.empty((rows, self.outputs), dtype=self.dtype)
        self.native.run_after_norm(
            x.data_ptr(),
            x.stride(0),
            other,
            rows,
            norm_weight.data_ptr(),
            eps,
            total.data_ptr() if other else 0,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out, total

    def _check_norm(self, norm_weight: Tensor) -> None:
        if (
            norm_weight.shape != (self.inputs,)
            or norm_weight.dtype != self.dtype
            or not norm_weight.is_cpu
            or not norm_weight.is_contiguous()
        ):
            raise ValueError(
                f"norm_weight must be contiguous {self.dtype} [{self.inputs}], "
                f"got {_shape(norm_weight)}"
            )
        self._norm = norm_weight  # the next call brings the same

    def after_silu(self, gate_up: Tensor) -> Tensor:
        """linear(silu(gate) * up) for gate_up [n, 2 * H], bitwise what the two give one by one."""
        gate_up = self._rows(gate_up, 2 * self.inputs).contiguous()
        rows = gate_up.shape[0]
        out = torch.empty((rows, self.outputs), dtype=self.dtype)
        self.native.run_after_silu(
            gate_up.data_ptr(), rows, out.data_ptr(), torch.get_num_threads()
        )
        return out


class CpuExperts:
    """SwiGLU experts whose projections each run as one loop over all experts."""

    def __init__(self, gate_up: Tensor, down: Tensor) -> None:
        """gate_up [E, 2 * X, H] and down [E, H, X], contiguous on the CPU, else ValueError."""
        for projection in (gate_up, down):
            if not projection.is_contiguous() or not cpu_backend.takes(projection):
                raise ValueError(f"experts must be contiguous on the CPU: {_shape(projection)}")
        self._tensors = (gate_up, down)
        self.dtype = gate_up.dtype
        experts, self.hidden, width = down.shape
        self.native = _cpu.Experts(
            cpu_backend.TYPES[down.dtype],
            gate_up.data_ptr(),
            down.data_ptr(),
            experts,
            width,
            self.hidden,
        )

    def __call__(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        """x [n, H], expert_ids int64 [n, t], weights float32 [n, t] -> [n, H].

        Raises ValueError for other shapes or dtypes, IndexError for an expert there isn't.
        """
        if x.dim() != 2 or x.shape[1] != self.hidden or x.dtype != self.dtype or not x.is_cpu:
            raise ValueError(f"x must be {self.dtype} [n, {self.hidden}], got {_shape(x)}")
        if (
            expert_ids.shape[:1] != x.shape[:1]
            or expert_ids.shape != weights.shape
            or expert_ids.dtype != torch.int64
            or weights.dtype != torch.float32
        ):
            raise ValueError(
                f"expert_ids int64 [n, t] and weights float32 [n, t] don't fit x: "
                f"{_shape(expert_ids, weights, x)}"
            )
        if x.stride(1) != 1:
            x = x.contiguous()
        expert_ids, weights = expert_ids.contiguous(), weights.contiguous()
        out = torch.empty(x.shape, dtype=self.dtype)
        self.native.run(
            x.data_ptr(),
            x.stride(0),
            x.shape[0],
            expert_ids.data_ptr(),
            weights.data_ptr(),
            expert_ids.shape[1],
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out
